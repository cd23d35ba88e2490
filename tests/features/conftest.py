"""The runs of features, too, have only metrics that docs/metrics.md explains."""

from tests.e2e.conftest import every_metric_has_a_sentence as every_metric_has_a_sentence
