"""One conversation driven by turns from two clients: taken in one, installed in the other, under one carry key."""

import itertools

import pytest

from conformance.drivers import LANGUAGES
from conformance.world import World
from serving import temporary_directory

NUM_TURNS = 4


@pytest.mark.parametrize("languages", list(itertools.permutations(LANGUAGES, 2)), ids="-then-".join)
def test_turns_from_two_clients_draft_as_the_oracle(languages, start_driver, shared_place):
    with temporary_directory() as directory:
        worlds = [World(start_driver(language), shared_place, directory) for language in languages]
        model, position = None, 0
        for turn, world in zip(range(NUM_TURNS), itertools.cycle(worlds), strict=False):
            client = f"c{turn}"
            world.run(
                {
                    "open": {"as": client, "carry_key": f"the key of {languages}"},
                    "expect": carries_after(turn, position),
                },
                {},
            )
            world.run({"open_sequence": {"of": client}}, {})
            if turn:
                world.carried["k"] = model
                world.driver.ask("install_kv", of=world.named("q"), carry=world.named(f"{client}.carries.0"))
                world.models["q"].rows = model.rows
                world.run({"state": {}, "expect": {"row_count": position}}, {})
            world.run({"catchup": {"key": position, "count": 9}}, {})
            world.run({"propose": {"key": position + 9, "drafts": 4}, "expect": {"drafts": 4}}, {})
            position += 10
            model = world.models["q"].forked(position)
            world.run({"take_kv": {"label": f"turn {turn}"}}, {})
            world.run({"close": {"of": client}}, {})
        for world in worlds:
            assert world.num_drafts == 4 * NUM_TURNS // len(worlds)
            world.check_comparisons()
            world.close()


def carries_after(turn, position):
    """What a client finds: the carry of the turn before, from the other client."""
    if not turn:
        return {"carries": []}
    return {"carries.0.label": f"turn {turn - 1}", "carries.0.ranges": [[0, position]]}
