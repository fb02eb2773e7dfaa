import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bireme.channel import Channel, PeerTimeout

torch.set_num_threads(1)

Ranks = Callable[..., list[Any]]

MESSAGES: list[Any] = [
    {"nœud": "βιρήμη ⛵", "ranks": [0, 1], "none": None},
    "",
    [1.5, -(2**53), True, "x" * 3000],
    None,
]


def call(rank: int, size: int, method: str, arguments: list[Any]) -> Any:
    channel = Channel(timeout_s=30)
    return getattr(channel, method)(arguments[rank])


def test_gather_is_for_rank_0(ranks: Ranks) -> None:
    blobs = [b"abc", b"x", b"\0" * 5000, "ναῦς".encode()]
    assert ranks(4, call, "gather", blobs) == [blobs, [], [], []]


def test_all_gather_is_for_everybody(ranks: Ranks) -> None:
    assert ranks(4, call, "all_gather", MESSAGES) == [MESSAGES] * 4


@pytest.mark.parametrize("blobs", [[b"", b"abc"], [b"abc", b""], [b"", b""]], ids=str)
def test_gather_of_nothing(blobs: list[bytes], ranks: Ranks) -> None:
    assert ranks(2, call, "gather", blobs) == [blobs, []]


def minima(rank: int, size: int) -> list[list[int]]:
    channel = Channel(timeout_s=30)
    tensors = [torch.tensor([rank, -rank, 5]), torch.tensor([[2**62 + rank]]), torch.empty(0, dtype=torch.int64)]
    results = [channel.reduce_min(tensor) for tensor in tensors]
    assert all(result is tensor for result, tensor in zip(results, tensors, strict=True))
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    results.append(channel.reduce_min(torch.tensor([10 * rank]), pairs[rank // 2]))
    return [result.flatten().tolist() for result in results]


def test_reduce_min_is_element_wise_over_the_group(ranks: Ranks) -> None:
    common: list[list[int]] = [[0, -3, 5], [2**62], []]
    assert ranks(4, minima) == [[*common, [0]]] * 2 + [[*common, [20]]] * 2


def test_many_messages_in_order(ranks: Ranks) -> None:
    assert ranks(2, many) == [True, True]


def many(rank: int, size: int) -> bool:
    channel = Channel(timeout_s=30)
    for number in range(50):
        blob = bytes([rank]) * (1 + number * (rank + 1))
        gathered = channel.gather(blob)
        assert gathered == ([bytes([peer]) * (1 + number * (peer + 1)) for peer in range(size)] if rank == 0 else [])
        assert channel.all_gather([number, rank]) == [[number, peer] for peer in range(size)]
    return True


@pytest.mark.parametrize("in_a_group", [False, True])
def test_one_process_answers_itself(in_a_group: bool, ranks: Ranks) -> None:
    expected = (b"blob", {"a": [1, None]}, [3, -3])
    assert (ranks(1, alone)[0] if in_a_group else alone(0, 1)) == expected


def alone(rank: int, size: int) -> tuple[bytes, Any, list[int]]:
    channel = Channel()
    assert (channel.rank, channel.size, channel.group) == (0, 1, None)
    (blob,) = channel.gather(b"blob")
    (message,) = channel.all_gather({"a": (1, None)})
    assert channel.gather(b"") == [b""]
    return blob, message, channel.reduce_min(torch.tensor([3, -3])).tolist()


def wait_for_nobody(rank: int, size: int, method: str, give_up_after_s: float | None) -> float | None:
    channel = Channel(timeout_s=1.0 if give_up_after_s is None else 60.0)
    waited_s = None
    if rank == 0:
        started = time.monotonic()
        if give_up_after_s is not None:
            channel.give_up = lambda: time.monotonic() > started + give_up_after_s
        argument = torch.tensor([1]) if method == "reduce_min" else b"x" if method == "gather" else "x"
        with pytest.raises(PeerTimeout, match="no answer from the other ranks"):
            getattr(channel, method)(argument)
        waited_s = time.monotonic() - started
    dist.barrier()
    return waited_s


@pytest.mark.parametrize("method", ["all_gather", "gather", "reduce_min"])
def test_a_peer_that_never_comes(method: str, ranks: Ranks) -> None:
    waited_s, _ = ranks(2, wait_for_nobody, method, None)
    assert 0.9 < waited_s < 10


def test_giving_up_sooner(ranks: Ranks) -> None:
    waited_s, _ = ranks(2, wait_for_nobody, "all_gather", 0.3)
    assert 0.2 < waited_s < 10


def come_late(rank: int, size: int) -> list[Any]:
    channel = Channel(timeout_s=30)
    if rank == 1:
        time.sleep(1.3)  # longer than a turn of waiting
    return channel.all_gather(rank)


def test_a_late_peer_is_waited_for(ranks: Ranks) -> None:
    assert ranks(2, come_late) == [[0, 1], [0, 1]]


def lose_a_peer(rank: int, size: int) -> str:
    channel = Channel(timeout_s=30)
    channel.all_gather(None)
    if rank == 1:
        del channel  # with it go the connections
        dist.destroy_process_group()
        return ""
    try:
        channel.all_gather(None)
    except PeerTimeout:
        return "timed out"
    except RuntimeError as error:
        return str(error).lower()
    return "answered"


def test_a_lost_peer_is_no_timeout(ranks: Ranks) -> None:
    message, _ = ranks(2, lose_a_peer)
    assert "closed" in message or "reset" in message


def stay_apart(rank: int, size: int) -> list[Any]:
    """The channel and the training group do not get into each other's way, in whatever order they are used."""
    channel = Channel(timeout_s=30)
    tensor = torch.ones(1)
    if rank == 0:
        work: Any = dist.all_reduce(tensor, async_op=True)
        said = channel.all_gather("here")
    else:
        said = channel.all_gather("there")
        work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    return [*said, float(tensor)]


def test_it_has_a_group_of_its_own(ranks: Ranks) -> None:
    assert ranks(2, stay_apart) == [["here", "there", 2.0]] * 2
