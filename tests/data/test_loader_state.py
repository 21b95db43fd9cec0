"""Where a loader is, whatever is done to it in whatever order: against a model."""

import threading

import pytest
from common_data import Numbers, at, loader_of, place, steps
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

LENGTH, BATCH = 10, 5
NEWER = "must run one epoch at a time, but a newer iter"


class Torn(Numbers):
    """Cannot be read while it is torn."""

    torn = False

    def __getitem__(self, index):
        if self.torn:
            raise ValueError("torn")
        return index


class Model:
    """Places are pairs; `changes` counts how often where `epochs` begins was changed."""

    def __init__(self):
        self.now = self.next = self.unused = 0, 0
        self.runs = self.is_left = False
        self.pin, self.changes = None, 0

    @property
    def state(self):
        """In a body an epoch counts as done once its loop was left."""
        if self.is_left and self.pin is not None:
            return self.now[0] + 1, 0
        return self.now if self.now[0] >= self.unused[0] else self.unused

    @property
    def is_set(self):
        return self.next[0] != self.now[0] + (self.pin is None)

    def begin(self):
        """Let a pass be asked for its first batch: only this begins an epoch."""
        self.now, self.runs, self.is_left = self.next, True, False
        self.next = (self.now[0] + 1, 0) if self.pin is None else self.next

    def deliver(self):
        self.now = self.now[0], self.now[1] + BATCH

    def leave_pass(self):
        self.is_left, self.runs = self.runs and not self.is_set, False

    def finish(self):
        self.runs = False
        if not self.is_set:
            self.unused, self.changes = (self.now[0] + 1, 0), self.changes + 1
            self.next = self.unused if self.pin is None else (self.now[0], 0)

    def go_to(self, where):
        self.next = self.unused = where
        self.is_left, self.now = False, self.now if self.runs else where

    def set_epoch(self, epoch):
        if self.pin is None or epoch != self.next[0]:
            self.changes += epoch != self.next[0]
            self.go_to(self.next if epoch == self.next[0] else (epoch, 0))

    def load(self, where):
        self.runs, self.changes = False, self.changes + 1
        self.go_to(where)

    def enter(self, count):
        """Return the epoch whose body begins, or None if none is left."""
        if self.unused[0] >= count:
            return None
        self.go_to(self.unused)
        self.pin = self.changes
        return self.unused[0]

    def leave(self, epoch, changes, *, at_end):
        if at_end and changes == self.changes:
            self.unused, self.changes = (epoch + 1, 0), self.changes + 1
        self.pin, self.next = None, self.unused


reference = loader_of(LENGTH, BATCH, shuffle=True)
ORDERS = [steps(reference) for _ in range(9)]
epochs = st.integers(0, 2)


class Loops(RuleBasedStateMachine):
    """Drives a loader: at most two passes and one loop of `epochs` are open at a time."""

    def __init__(self):
        super().__init__()
        self.data, self.model = Torn(LENGTH), Model()
        self.loader = loader_of(self.data, BATCH, shuffle=True)
        self.passes, self.fresh, self.newest, self.loops = [], set(), None, []

    @invariant()
    def it_is_where_the_model_is(self):
        model = self.model
        assert place(self.loader) == model.state
        assert self.loader.epoch == (model.now if model.runs else model.next)[0]
        at(reference, *model.now)
        assert self.loader.fingerprint() == reference.fingerprint()

    @precondition(lambda self: self.model.next[0] < len(ORDERS) and len(self.passes) < 2)
    @rule()
    def iterate(self):
        self.passes.append(iter(self.loader))
        self.fresh.add(id(self.passes[-1]))

    @precondition(lambda self: self.passes)
    @rule(which=st.integers(0, 1), torn=st.booleans())
    def step(self, which, torn):
        chosen = self.passes[which % len(self.passes)]
        if id(chosen) in self.fresh and self.model.next[0] >= len(ORDERS):
            return  # it was made before the last epoch that the model knows
        if id(chosen) in self.fresh:
            self.fresh.remove(id(chosen))
            self.newest = chosen
            self.model.begin()
        epoch, delivered = self.model.now
        self.data.torn = torn
        if chosen is not self.newest or not self.model.runs:
            over = StopIteration if chosen is self.newest else (RuntimeError, StopIteration)
            with pytest.raises(over) as raised:
                next(chosen)
            assert raised.type is StopIteration or NEWER in str(raised.value)
        elif delivered == LENGTH:
            assert next(chosen, None) is None
            self.model.finish()
        elif torn:
            with pytest.raises(RuntimeError, match="could not be read"):
                next(chosen)
            self.model.runs = False
        else:
            assert next(chosen).tolist() == ORDERS[epoch][delivered // BATCH]
            self.model.deliver()
        self.data.torn = False

    @precondition(lambda self: self.model.next[0] < len(ORDERS) and len(self.passes) < 2)
    @rule(whole=st.booleans())
    def read_an_epoch(self, whole):
        self.iterate()
        self.step(len(self.passes) - 1, torn=False)
        while whole and self.model.runs:
            self.step(len(self.passes) - 1, torn=False)
        self.leave(len(self.passes) - 1)

    @precondition(lambda self: self.passes)
    @rule(which=st.integers(0, 1))
    def leave(self, which):
        left = self.passes.pop(which % len(self.passes))
        self.fresh.discard(id(left))
        if left is self.newest:
            self.newest = None
            self.model.leave_pass()
        del left

    @precondition(lambda self: not self.loops)
    @rule(more=epochs)
    def begin_epochs(self, more):
        count = self.model.unused[0] + more
        self.go_on(self.loader.epochs(count), count)

    @precondition(lambda self: self.loops)
    @rule()
    def end_body(self):
        loop, count, epoch, changes = self.loops.pop()
        self.model.leave(epoch, changes, at_end=True)
        self.go_on(loop, count)

    def go_on(self, loop, count):
        epoch = self.model.enter(count)
        assert next(loop, None) == epoch
        if epoch is not None:
            self.loops.append((loop, count, epoch, self.model.changes))

    @precondition(lambda self: self.loops)
    @rule(error=st.booleans())
    def break_epochs(self, error):
        loop, _, epoch, changes = self.loops.pop()
        if error:
            with pytest.raises(LookupError):
                loop.throw(LookupError())
        loop.close()
        self.model.leave(epoch, changes, at_end=False)

    @rule(epoch=epochs)
    def set_epoch(self, epoch):
        self.loader.set_epoch(epoch)
        self.model.set_epoch(epoch)

    @rule(epoch=epochs, number=st.integers(0, LENGTH // BATCH))
    def load(self, epoch, number):
        at(self.loader, epoch, number * BATCH)
        self.model.load((epoch, number * BATCH))
        self.newest = None


Loops.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestLoops = Loops.TestCase


# --- threads


class Waiting(Numbers):
    """Its sample 5 waits until it is let go."""

    def __init__(self):
        super().__init__(LENGTH)
        self.asked, self.go = threading.Event(), threading.Event()

    def __getitem__(self, index):
        if index == BATCH and threading.current_thread() is not threading.main_thread():
            self.asked.set()
            self.go.wait()
        return index


def test_a_thread_whose_loop_another_thread_took_over_delivers_nothing_more():
    data, raised, seen = Waiting(), [], []
    loader = loader_of(data, BATCH)

    def loop():
        try:
            seen.extend(batch.tolist() for batch in loader)
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=loop)
    thread.start()
    data.asked.wait()
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1, 2, 3, 4]
    data.go.set()
    thread.join()
    assert seen == [[0, 1, 2, 3, 4]]
    assert NEWER in raised[0]
    assert place(loader) == (1, BATCH)
    assert [len(batch) for batch in batches] == [BATCH]
