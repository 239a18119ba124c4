"""The cut: exact against brute force, with prologue, epilogue and memory."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_parallel.pipeline.search import cut_layers, stage_costs
from lightning_parallel.pipeline.simulate import Cost


def all_cuts(num_layers, num_stages):
    for inner in combinations(range(1, num_layers), num_stages - 1):
        yield tuple(stop - start for start, stop in pairwise((0, *inner, num_layers)))


def slowest(layers, cut, **ends):
    return max(cost.total_s for cost in stage_costs(layers, cut, **ends))


def timed(seconds):
    return [Cost(second) for second in seconds]


@given(st.data())
def test_no_cut_is_better(data):
    seconds = data.draw(st.lists(st.integers(0, 20), min_size=1, max_size=9).filter(any))
    num_stages = data.draw(st.integers(1, min(4, len(seconds))))
    ends = {"prologue": Cost(data.draw(st.integers(0, 30))), "epilogue": Cost(0, data.draw(st.integers(0, 30)))}
    layers = timed(seconds)
    cut = cut_layers(layers, num_stages, "measured", **ends)
    cuts = list(all_cuts(len(layers), num_stages))
    assert cut in cuts
    best = min(slowest(layers, each, **ends) for each in cuts)
    assert slowest(layers, cut, **ends) == best

    def squares(each):
        return sum(cost.total_s**2 for cost in stage_costs(layers, each, **ends))

    assert squares(cut) == min(squares(each) for each in cuts if slowest(layers, each, **ends) == best)


@given(st.data())
def test_no_cut_within_the_memory_is_better(data):
    sizes = st.integers(0, 9)
    layers = data.draw(
        st.lists(
            st.builds(Cost, st.integers(1, 9), activation_bytes=sizes, resident_bytes=sizes), min_size=3, max_size=7
        )
    )
    num_stages = data.draw(st.integers(1, 3))
    in_flight = [num_stages - stage for stage in range(num_stages)]
    ends = {"prologue": Cost(2, activation_bytes=1, resident_bytes=4), "epilogue": Cost(3, resident_bytes=6)}
    cap = data.draw(st.integers(5, 60))

    def held(cut):
        costs = stage_costs(layers, cut, **ends)
        return max(cost.resident_bytes + n * cost.activation_bytes for cost, n in zip(costs, in_flight))

    fitting = [cut for cut in all_cuts(len(layers), num_stages) if held(cut) <= cap]
    if fitting:
        cut = cut_layers(layers, num_stages, memory_cap_bytes=cap, in_flight=in_flight, **ends)
        assert held(cut) <= cap
        assert slowest(layers, cut, **ends) == min(slowest(layers, each, **ends) for each in fitting)
    else:
        least = min(held(cut) for cut in all_cuts(len(layers), num_stages))
        with pytest.raises(ValueError, match=f"within {cap} bytes; the best needs {least}"):
            cut_layers(layers, num_stages, memory_cap_bytes=cap, in_flight=in_flight, **ends)


def test_a_skewed_model():
    layers = timed([1, 1, 1, 1, 9, 1, 1, 1])
    assert cut_layers(layers, 4, "uniform") == (2, 2, 2, 2)
    cut = cut_layers(layers, 4, epilogue=Cost(3))
    assert slowest(layers, cut, epilogue=Cost(3)) == 9
    assert cut == (4, 1, 2, 1)


def test_the_even_cut_is_found():
    assert cut_layers(timed([1] * 12), 4) == (3, 3, 3, 3)
    assert cut_layers(timed([1] * 10), 4, prologue=Cost(1), epilogue=Cost(1)) == (2, 3, 3, 2)


def test_a_heavy_head_takes_layers_from_the_last_stage():
    assert cut_layers(timed([1] * 8), 2, epilogue=Cost(4)) == (6, 2)


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "expected"),
    [(8, 4, (2, 2, 2, 2)), (9, 4, (2, 3, 2, 2)), (10, 4, (2, 3, 3, 2)), (11, 4, (3, 3, 3, 2)), (3, 3, (1, 1, 1))],
)
def test_uniform_spreads_the_rest_from_the_middle(num_layers, num_stages, expected):
    assert cut_layers([Cost()] * num_layers, num_stages, "uniform") == expected


def test_parameters_counts_what_is_resident():
    layers = [Cost(1, resident_bytes=size) for size in (8, 1, 1, 1, 1)]
    assert cut_layers(layers, 2, "parameters") == (1, 4)
    assert cut_layers(layers, 2, "parameters", epilogue=Cost(resident_bytes=4)) == (1, 4)
    assert cut_layers(layers, 2, "measured") in {(2, 3), (3, 2)}


def test_explicit_layers_are_taken_as_they_are():
    assert cut_layers(timed([1] * 6), 3, [1, 1, 4]) == (1, 1, 4)


@pytest.mark.parametrize("balance", [[3, 3], [1, 1, 1], [0, 3, 3], [2, 2, 3]])
def test_explicit_layers_that_do_not_add_up(balance):
    with pytest.raises(ValueError, match="3 stages at least one layer each, 6 in all"):
        cut_layers(timed([1] * 6), 3, balance)


def test_fewer_layers_than_stages():
    with pytest.raises(ValueError, match="got 3 layers for 4 stages"):
        cut_layers(timed([1] * 3), 4)


def test_an_unknown_balance():
    with pytest.raises(ValueError, match="got 'even'"):
        cut_layers(timed([1] * 4), 2, "even")


@pytest.mark.parametrize("balance", ["auto", "measured", "parameters"])
def test_nothing_to_balance(balance):
    with pytest.raises(ValueError, match="needs layers with a cost"):
        cut_layers([Cost()] * 4, 2, balance)


def test_in_flight_of_the_wrong_length():
    with pytest.raises(ValueError, match="`in_flight` of 2 stages, got 3"):
        cut_layers(timed([1] * 4), 2, memory_cap_bytes=1, in_flight=[1, 2, 3])


def test_stage_costs_include_the_ends():
    layers = timed([1, 2, 3])
    costs = stage_costs(layers, (2, 1), prologue=Cost(10), epilogue=Cost(20))
    assert [cost.total_s for cost in costs] == [13, 23]
