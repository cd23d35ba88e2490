"""One rank that Ray places on a GPU against the same run in one process."""

from __future__ import annotations

import pytest

pytest.importorskip("ray")

from tests.e2e.test_ray import FIXED, assert_same, cluster, fit  # noqa: F401
from tests.e2e.test_training import tiny_config

pytestmark = pytest.mark.gpu


def test_a_rank_that_ray_places_gives_the_numbers_of_this_process(
    cluster: None,  # noqa: F811
    tiny_task,
    tmp_path,
    device,
) -> None:
    for launcher in ("local", "ray"):
        fit(
            tiny_config(
                tiny_task,
                tmp_path / launcher,
                *FIXED,
                f"trainer.device={device.type}",
                f"trainer.launcher={launcher}",
            )
        )
    assert_same(tmp_path / "local", tmp_path / "ray")
