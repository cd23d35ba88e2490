"""Says what a rule found, and where: `Finding` and `Place`."""

from typing import NamedTuple

from torch import Tensor

from data.protocol import DataProto


class Place(NamedTuple):
    """Names the episode that shows what an alarm says, or the group.

    Attributes:
        episode: its `episode_id`; "": none is known.
        row, token: of the episode's rows, and of that row's response; None: not known.
        group: the `uid` of its group.
    """

    episode: str = ""
    row: int = 0
    token: int | None = None
    group: str = ""


class Finding(NamedTuple):
    """Names an alarm, and says what was seen, with the episode and the token.

    Attributes:
        advice: what to check in this case; "": what the alarm says of itself.
    """

    alarm: str
    text: str
    place: Place = Place()
    advice: str = ""


def place_of(batch: DataProto, row: int, token: int | None = None) -> Place:
    """Says to which episode a row belongs, as the viewer finds it."""
    columns = batch.non_tensor_batch
    ids = columns.get("episode_id", columns.get("uid"))
    if ids is None:
        return Place()
    number = int(columns["episode_row"][row]) if "episode_row" in columns else 0
    return Place(episode=str(ids[row]), row=number, token=token)


def first_place(batch: DataProto, wrong: Tensor) -> Place:
    """Says of which episode the first token is where `wrong`, (B, R) bool."""
    row, token = wrong.nonzero()[0].tolist()
    return place_of(batch, row, token)


def first_token_name(batch: DataProto, wrong: Tensor) -> str:
    """Names the first token where `wrong`, (B, R) bool."""
    row, token = wrong.nonzero()[0].tolist()
    return f"token {token} of the response of {owner_name(batch, row)}"


def owner_name(batch: DataProto, row: int) -> str:
    """Names the episode of a row, or the row where episodes have no names."""
    ids = batch.non_tensor_batch.get("episode_id", batch.non_tensor_batch.get("uid"))
    return f"row {row}" if ids is None else f"episode {ids[row]}"
