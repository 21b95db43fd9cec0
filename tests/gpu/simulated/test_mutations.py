"""The table of mutations is of the source as it is, and the quick ones of it turn a test red."""

import mutations
import pytest

QUICK = [name for name, mutation in mutations.MUTATIONS.items() if mutation.is_quick]


@pytest.mark.parametrize("name", mutations.MUTATIONS)
def test_what_a_mutation_takes_out_is_in_the_source_once(name):
    mutation = mutations.MUTATIONS[name]
    text = (mutations.SOURCE / mutation.file).read_text()
    compile(mutations.mutated(text, mutation), mutation.file, "exec")


def test_each_wait_event_and_pin_of_the_source_is_in_the_table():
    assert mutations.unnamed() == []


@pytest.mark.parametrize("name", QUICK)
def test_a_test_sees_it(name):
    outcome = mutations.tried(mutations.MUTATIONS[name])
    assert outcome.red, outcome.told
    assert outcome.told == ""
