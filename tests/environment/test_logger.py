"""A logger that knows its rank: who writes, what stands before the line, and from where."""

import inspect
import logging

import pytest
from launched import torchrun_variables
from logged import kept
from on_ranks import run_caught

from pardata import get_logger
from pardata.environment._logger import logged_once

LEVELS = ["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]


@pytest.fixture
def log(request):
    yield kept(request.node.name)
    logged_once.clear()


def write_at_all_levels():
    log, keeper = kept("levels")
    for level in LEVELS:
        log.log(getattr(logging, level), "at %s", level)
    return keeper.lines


@pytest.mark.parametrize("size", [1, 2, 3])
def test_below_warning_rank_0_writes_and_from_warning_on_every_rank(size):
    for rank, lines in enumerate(run_caught(write_at_all_levels, world_size=size)):
        levels = LEVELS if rank == 0 else LEVELS[2:]
        prefix = f"[{rank}/{size}] " if size > 1 else ""
        assert lines == [f"{prefix}at {level}" for level in levels]


def write_on(choices):
    log, keeper = kept("ranks")
    for ranks in choices:
        log.info("%s", ranks, ranks=ranks)
        log.error("%s", ranks, ranks=ranks)
    return keeper.lines


# For whom, and how many of two lines each rank writes.
CHOSEN = [("all", [2, 2, 2]), ([1], [0, 2, 0]), ([], [0, 0, 0]), (range(1, 3), [0, 2, 2])]


def test_ranks_can_be_chosen_for_one_call():
    choices = [ranks for ranks, _ in CHOSEN]
    for rank, lines in enumerate(run_caught(write_on, choices, world_size=3)):
        assert [lines.count(f"[{rank}/3] {ranks}") for ranks in choices] == [
            counts[rank] for _, counts in CHOSEN
        ]


def test_once_logs_each_written_line_a_single_time(log):
    logger, keeper = log
    logger.logger.setLevel(logging.WARNING)
    logger.info("the same %d", 1, once=True)
    logger.logger.setLevel(logging.INFO)
    logger.info("the same %d", 1, ranks=[3], once=True)
    assert keeper.lines == []
    for _ in range(3):
        logger.info("the same %d", 1, once=True)
        get_logger(logger.logger.name).info("the same %d", 1, once=True)
    assert keeper.lines == ["the same 1"]
    logger.info("the same %d", 2, once=True)
    logger.warning("the same %d", 1, once=True)
    get_logger(f"{logger.logger.name}.child").info("the same %d", 1, once=True)
    assert len(keeper.lines) == 4
    logger.info("the same %d", 1)
    assert len(keeper.lines) == 5


def test_what_logging_takes_pardata_takes(log):
    logger, keeper = log
    for _ in range(2):
        logger.info("%(a)s of 100%%", {"a": 1}, once=True)
    logger.info({"not": "a string"})
    logger.info("100% sure", extra={"step": 3}, stack_info=True)
    assert keeper.lines == ["1 of 100%", "{'not': 'a string'}", "100% sure"]
    assert keeper.records[2].step == 3
    assert keeper.records[2].stack_info is not None


def line_here():
    return inspect.currentframe().f_back.f_lineno


@pytest.mark.parametrize("method", ["info", "exception", "log"])
def test_a_record_shows_the_file_line_and_function_of_the_caller(log, method):
    logger, keeper = log
    level = [logging.INFO] if method == "log" else []
    getattr(logger, method)(*level, "x")
    line = line_here() - 1
    (record,) = keeper.records
    assert (record.pathname, record.lineno) == (__file__, line)
    assert record.funcName == "test_a_record_shows_the_file_line_and_function_of_the_caller"


def test_before_init_the_rank_comes_from_the_launchers_variables(log, monkeypatch):
    logger, keeper = log
    for name, value in torchrun_variables(1, 3, 29511).items():
        monkeypatch.setenv(name, value)
    logger.warning("early\nand %s", "late")
    logger.info("not on rank 1")
    assert keeper.lines == ["[1/3] early\n[1/3] and late"]
    monkeypatch.setenv("PARDATA_LAUNCHER", "none")
    logger.info("alone")
    assert keeper.lines[1:] == ["alone"]


def test_broken_variables_do_not_break_a_log_line(log, monkeypatch):
    monkeypatch.setenv("RANK", "nonsense")
    log[0].info("still there")
    assert log[1].lines == ["still there"]


def test_asking_for_a_logger_configures_nothing():
    root = logging.root.level, list(logging.root.handlers), logging.root.disabled
    plain = get_logger("never.seen.before").logger
    assert plain is logging.getLogger("never.seen.before")
    assert (plain.level, plain.handlers, plain.propagate) == (logging.NOTSET, [], True)
    assert (logging.root.level, list(logging.root.handlers), logging.root.disabled) == root
