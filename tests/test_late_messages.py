"""Messages through the host, and attention that exchanges them: nothing is read before it has arrived or written while it is
sent."""

from __future__ import annotations

import pytest
import torch
from ranks import LATE, RankError, Ranks
from test_distributed import WORLD, check, drawn

from fastmax.distributed import communication


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    ranks = Ranks(WORLD, tmp_path_factory.mktemp("ranks"), LATE)
    yield ranks
    ranks.close()


def start(group, kind: str, x: torch.Tensor) -> communication.Pending:
    """Starts a collective that sends x (ranks, 5)."""
    rank, world = group.rank(), group.size()
    if kind == "all_gather":
        return communication.all_gather("x", x, group)
    if kind == "all_to_all":
        return communication.all_to_all("x", x, group)
    if kind == "uneven":  # to every rank one row more than to the one before
        rows = torch.cat([x[:1].expand(other, 5) for other in range(world)])
        return communication.all_to_all("x", rows, group, list(range(world)), [rank] * world)
    # The last rank sends nothing.
    sent = x.flatten() if rank < world - 1 else x.new_empty(0)
    return communication.ring_send_recv("x", sent, x.numel() if rank else 0, group, tag=1)


def exchanged(group, kind: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the result before the message arrives, the result after it, and the tensor that was sent."""
    x = group.rank() + torch.arange(group.size() * 5.0, device=device).view(-1, 5) / 100
    pending = start(group, kind, x)
    before = pending._result.clone()
    return before.cpu(), pending.wait().cpu(), x.cpu()


@pytest.mark.parametrize("kind", ["all_gather", "all_to_all", "uneven", "ring_send_recv"])
def test_messages_come_when_they_are_waited_for(ranks, kind, device):
    results = ranks.run(exchanged, kind, device)
    sent = [x for *_, x in results]
    for rank, (before, came, _) in enumerate(results):
        assert before.isnan().all() and before.shape == came.shape
        expected = {
            "all_gather": lambda rank: torch.stack(sent),
            "all_to_all": lambda rank: torch.stack([x[rank] for x in sent]),
            "uneven": lambda rank: torch.cat([x[:1].expand(rank, 5) for x in sent]),
            "ring_send_recv": lambda rank: sent[rank - 1].flatten() if rank else torch.empty(0),
        }
        assert torch.equal(came, expected[kind](rank))


def overwritten(group, device: torch.device) -> None:
    x = torch.ones(3, device=device)
    pending = communication.all_gather("x", x, group)
    pending._works[0].started()
    x.fill_(2.0)
    pending.wait()


def test_what_is_sent_must_stay_as_it_is(ranks, device):
    ranks.start(overwritten, device)
    for error in ranks.results():
        with pytest.raises(RankError, match="the exchange of x failed .* is sent was written to before its message"):
            raise error


@pytest.mark.parametrize("seed", range(10))
def test_attention_takes_late_messages(ranks, seed):
    check(ranks, drawn(seed + 2000))
