"""Messages between stages: what is on the wire, in which order, and who is named when one does not come."""

import os
import weakref

import pytest
import torch
import torch.distributed as dist

from lightning_parallel import comm
from lightning_parallel.comm import Group
from lightning_parallel.compat import patched
from lightning_parallel.pipeline import p2p
from lightning_parallel.pipeline.p2p import FAILURE, Message, MessageLayout, MessageLayouts, StageMessages, TensorSpec
from lightning_parallel.pipeline.schedule import Action, Kind, build_schedule, forward_only
from tests.harness import RankError, distributed, recorded_communication, run
from tests.strict_order import strict_order

CPU = torch.device("cpu")


def message(*tensors, index=1):
    return Message(MessageLayout(index, tuple(range(len(tensors))), tuple(map(TensorSpec.of, tensors))), tensors)


def exchange(group, schedule, messages, layouts):
    """Send `messages` from rank 0 to rank 1 and what look like their gradients back; gives what arrived."""
    links = StageMessages(group, schedule, CPU, layouts)
    links.post()
    arrived = []
    for number, sent in enumerate(messages):
        if group.rank == 0:
            links.send_activations(0, number, sent)
        else:
            arrived.append(links.receive_activations(Action(Kind.F, 1, number)))
    for number, sent in enumerate(messages):
        if group.rank == 0:
            arrived.append(links.receive_gradients(Action(Kind.B, 0, number)))
        else:
            wanted = [t for t, spec in zip(sent.tensors, sent.layout.tensors) if spec.requires_grad]
            links.send_gradients(1, number, [2 * tensor.detach() for tensor in wanted])
    links.finish()
    return arrived


@distributed(world_size=2)
def test_any_tensors_in_any_order_arrive(group):
    torch.manual_seed(4)
    hidden = torch.randn(3, 5, requires_grad=True)
    many = [
        message(hidden, torch.tensor([True, False]), torch.randn(2, 2, dtype=torch.bfloat16)),
        message(hidden * 2, torch.tensor([False, True]), torch.ones(2, 2, dtype=torch.bfloat16)),
        message(torch.randn(1, 5, requires_grad=True), index=2),
        message(torch.randn(1, 5, requires_grad=True), torch.empty(0, 3), index=2),
        message(torch.tensor(3), hidden.t()),
        message(torch.randn(4, 3)[:, 0], torch.randn(3, dtype=torch.complex64).conj(), torch.randn(2, 4)[:, ::2]),
        message(torch.randn(4, 3)[:, 0], torch.randn(3, dtype=torch.complex64).conj(), torch.randn(2, 4)[:, ::2]),
        message(),
    ]
    schedule, layouts = build_schedule("gpipe", 2, len(many)), MessageLayouts()
    for _ in range(2):
        arrived = exchange(group, schedule, many, layouts)
        for sent, got in zip(many, arrived):
            if group.rank == 1:
                assert got.layout == sent.layout
                assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(got.tensors, sent.tensors))
            else:
                wanted = [2 * tensor for tensor in sent.tensors if tensor.requires_grad]
                assert len(got) == len(wanted)
                assert all(torch.equal(a, b) for a, b in zip(got, wanted))


@distributed(world_size=2)
def test_buffers_are_fresh_and_fit_for_training(group):
    sent = [message(torch.full((4,), float(number), requires_grad=True)) for number in range(3)]
    with torch.inference_mode():
        arrived = exchange(group, build_schedule("gpipe", 2, 3), sent, MessageLayouts())
    tensors = [part for got in arrived for part in (got.tensors if group.rank else got)]
    assert not any(tensor.is_inference() for tensor in tensors)
    assert len({tensor.data_ptr() for tensor in tensors}) == 3


@distributed(world_size=2)
@strict_order(False)
def test_gradients_are_freed_once_the_sender_of_an_activation_must_have_used_them(group):
    """Rank 0 runs F0 F1 B0 F2 B1 F3 B2 B3: the activation of F3 says that the gradients 0 and 1 have arrived."""
    links = StageMessages(group, build_schedule("1f1b", 2, 4), CPU, MessageLayouts())
    links.post()
    sent = []
    for action in build_schedule("1f1b", 2, 4).rows[group.rank]:
        _, stage, number = action
        if action.kind is Kind.F and group.rank == 0:
            links.send_activations(0, number, message(torch.ones(3, requires_grad=True)))
        elif action.kind is Kind.F:
            links.receive_activations(action)
            alive = [number for number, gradient in enumerate(sent) if gradient() is not None]
            assert alive == {0: [], 1: [0], 2: [1], 3: [2]}[number]
        elif group.rank == 0:
            links.receive_gradients(action)
        else:
            gradient = torch.ones(3)
            sent.append(weakref.ref(gradient))
            links.send_gradients(1, number, [gradient])
            del gradient
    links.finish()


@distributed(world_size=2)
def test_stages_on_one_rank_hand_over_without_a_message(group):
    schedule = build_schedule("zbv", 2, 1)
    links = StageMessages(group, schedule, CPU, MessageLayouts())
    with recorded_communication() as records:
        if group.rank == 1:
            sent = message(torch.ones(3, requires_grad=True))
            links.send_activations(1, 0, sent)
            assert links.receive_activations(Action(Kind.F, 2, 0)) is sent
            links.send_gradients(2, 0, [torch.ones(3)])
            assert torch.equal(links.receive_gradients(Action(Kind.I, 1, 0))[0], torch.ones(3))
    assert not records


def test_a_schedule_out_of_step_is_named():
    """The workers are not used again: they leave messages behind that nobody takes."""
    with pytest.raises(RankError) as error:
        run(_out_of_step, 2)
    assert "Rank 1 runs 1F0 and must receive the output of 0F0 from rank 0; got the output of 0F1" in str(error.value)


def _out_of_step(group):
    links = StageMessages(group, build_schedule("gpipe", 2, 2), CPU, MessageLayouts())
    if group.rank == 0:
        links.send_activations(0, 1, message(torch.ones(3)))
        _out_of_step.links = links  # gloo forgets a message whose sender does not keep it
    else:
        links.receive_activations(Action(Kind.F, 1, 0))


def test_a_lost_rank_is_named_with_what_it_owes():
    with pytest.raises(RankError) as error:
        run(_leave, 2, deadline_s=40)
    assert "Rank 1, pipeline stage 1, waited in vain at 1F0 for 0F0 of rank 0" in str(error.value)


def _leave(group):
    links = StageMessages(group, build_schedule("1f1b", 2, 2), CPU, MessageLayouts())
    comm.barrier(group)
    if group.rank == 0:
        os._exit(3)
    links.receive_activations(Action(Kind.F, 1, 0))


def rows(count, start=0.0):
    """A message of `count` rows of numbers from `start` on."""
    return message(torch.arange(float(start), start + 2 * count).view(count, 2).requires_grad_())


def channels_of(group, schedule):
    """A group for each channel, which carries one operation after the other, as the strategy makes them for NCCL."""
    found = {}
    for sender, receiver, kind in schedule.channels:
        made = dist.new_group(list(group.ranks))
        found[sender, receiver, kind] = Group(f"{kind.name}", group.ranks, group.rank, made)
    return found


@distributed(world_size=2)
def test_layouts_that_change_at_any_message_arrive_by_the_rules_of_nccl(group):
    """Steady, then changed in the middle, back to a known one, empty, in evaluation beside training, and after that."""
    lengths = [(3, 3, 3, 3), (3, 3, 5, 3), (3, 3, 3, 3), (4, 5, 6, 7), (7, 7, 7, 7), (7, 0, 7, 7), (7, 7, 7, 7)]
    with strict_order():
        trained, evaluated = build_schedule("1f1b", 2, 4), forward_only(build_schedule("1f1b", 2, 4))
        channels, layouts = channels_of(group, trained), MessageLayouts()
        for step, counts in enumerate(lengths):
            for schedule in (trained, evaluated):
                links = StageMessages(group, schedule, CPU, layouts, channels)
                links.post()
                for action in schedule.rows[group.rank]:
                    kind, _, number = action
                    sent = rows(counts[number] + (not schedule.is_training), 10 * step + number)
                    if kind is Kind.F and group.rank == 0:
                        links.send_activations(0, number, sent)
                    elif kind is Kind.F:
                        got = links.receive_activations(action)
                        assert got.layout == sent.layout
                        assert torch.equal(got.tensors[0], sent.tensors[0])
                    elif group.rank == 0:
                        assert torch.equal(links.receive_gradients(action)[0], 2 * sent.tensors[0])
                    else:
                        links.send_gradients(1, number, [2 * sent.tensors[0].detach()])
                links.finish()
                assert not links._posted, "a later message would fill it"


@distributed(world_size=2)
def test_a_failure_fills_what_was_expected_and_leaves_the_layouts(group):
    schedule, layouts = forward_only(build_schedule("gpipe", 2, 3)), MessageLayouts()
    for failing in (None, 1, None):
        links = StageMessages(group, schedule, CPU, layouts)
        links.post()
        for number in range(3):
            sent = Message(FAILURE, ()) if number == failing else rows(3, number)
            if group.rank == 0:
                links.send_activations(0, number, sent)
            else:
                got = links.receive_activations(Action(Kind.F, 1, number))
                assert got.layout.is_failure == (number == failing)
                assert len(got.tensors) == (number != failing)
        links.finish()


@pytest.mark.parametrize("blocks", [False, True])
@distributed(world_size=2)
def test_a_message_is_under_way_before_it_is_wanted(blocks, group):
    """From the third on, a stage has begun to receive a message when the one before has come: where it may wait."""
    schedule = forward_only(build_schedule("gpipe", 2, 4))
    with strict_order(), patched(p2p, "_waits_block_hosts", lambda: blocks):
        links = StageMessages(group, schedule, CPU, MessageLayouts(), channels_of(group, schedule))
        links.post()
        for number in range(4):
            if group.rank == 0:
                links.send_activations(0, number, rows(3, number))
                continue
            assert torch.equal(
                links.receive_activations(Action(Kind.F, 1, number)).tensors[0], rows(3, number).tensors[0]
            )
            ahead = links._posted.get((Kind.F, 0))
            if blocks or number == 3:
                assert ahead is None
            else:
                assert [len(each) for each in ahead.buffers] == ([3] if number else [])
        links.finish()
