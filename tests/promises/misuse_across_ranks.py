"""Bad inputs to what works across ranks, and to what a run leaves behind: errors on every rank."""

import tempfile

from misuse import MANY, case

from pardata import MetricWriter, get_logger, progress, rank_zero_first

ONE = (1,)  # for what starts processes of its own


def cyclic():
    value = [1.0]
    value.append(value)
    return value


def first(work, **options):
    with rank_zero_first(**options):
        work()


def written(step, values):
    """Write on all ranks; return after that."""
    with tempfile.TemporaryDirectory() as directory, MetricWriter(directory) as writer:
        writer.write(step, values)


def fails(message="no disk"):
    raise OSError(message)


def shown(**values):
    progress([1]).show(**values)


def logged(**options):
    get_logger("misuse").warning("a line", **options)


def steps(*yielded):
    return iter(yielded)


CASES = {
    "all_reduce_mean": [
        case("all_reduce_mean({'loss': [1.0, 2.0, '3']})", "TypeError",
             "`value['loss'][2]` must be a number or a tensor, but is '3' (str)"),
        case("all_reduce_mean({'loss': None})", "TypeError",
             "`value['loss']` must be a number or a tensor, but is None"),
        case("all_reduce_mean({'loss': 1.0 if rank == 0 else None})", "TypeError",
             "`value['loss']` must be a number or a tensor, but is None", sizes=MANY),
        case("all_reduce_mean(torch.ones(2).to_sparse())", "TypeError",
             "`value` must be a dense tensor of real numbers, but is a torch.sparse_coo"),
        case("all_reduce_mean([torch.ones(2) * 1j])", "TypeError",
             "`value[0]` must be a dense tensor of real numbers, but is complex"),
        case("all_reduce_mean(1j)", "TypeError", "must be a number or a tensor, but is 1j"),
        case("all_reduce_mean(cyclic())", "RecursionError", "maximum recursion depth exceeded",
             ours=False, label="a list that holds itself"),
        case("all_reduce_mean({'loss': 1.0} if rank == 0 else {'loss': 1.0, 'top1': 0.5})",
             "RuntimeError", "`structure` differs", "rank 0: structure=", "['top1']",
             "the same structure on every rank", sizes=MANY),
        case("all_reduce_mean(torch.zeros(3 + rank))", "RuntimeError", "`structure` differs",
             "value: 3", "value: 4", sizes=MANY),
        case("all_reduce_mean(torch.zeros(1000 if rank == 0 else 3))", "RuntimeError",
             "`structure` differs", "value: 1000", "value: 3", sizes=MANY),
        case("all_reduce_mean(1.0) if rank == 0 else all_reduce_sum(1.0)", "RuntimeError",
             "`call` differs", "all_reduce_mean", "all_reduce_sum", sizes=MANY),
        case("all_reduce_mean(1.0, weight=-1)", "ValueError",
             "`weight` must be a finite number that is not negative, but is -1"),
        case("all_reduce_mean(1.0, weight=float('nan'))", "ValueError", "`weight` must be", "nan"),
        case("all_reduce_mean(1.0, weight=float('inf'))", "ValueError", "`weight` must be", "inf"),
        case("all_reduce_mean(1.0, weight=-1 if rank == 0 else 1)", "ValueError",
             "`weight` must be a finite number that is not negative", sizes=MANY),
        case("all_reduce_mean(1.0, weight='8')", "TypeError", "`weight` must be one number",
             "'8'"),
        case("all_reduce_mean(1.0, weight=torch.ones(2))", "TypeError",
             "`weight` must be one number", "tensor([1., 1.])"),
        case("all_reduce_mean(1.0, weight=0)", "ValueError",
             "`weight` must be positive on at least one rank, but is 0 on all"),
    ],
    "all_reduce_sum": [
        case("all_reduce_sum(2**53)", "OverflowError", "below 2**53 to be exact", "as a float"),
        case("all_reduce_sum(torch.tensor([2**60, 1]))", "OverflowError", "below 2**53"),
        case("all_reduce_sum('1')", "TypeError", "`value` must be a number or a tensor"),
    ],
    "all_reduce_max": [
        case("all_reduce_max({'loss': 'low'})", "TypeError",
             "`value['loss']` must be a number or a tensor, but is 'low' (str)"),
        case("all_reduce_max(2**53 if rank == 0 else 1)", "OverflowError",
             "below 2**53 to be exact", sizes=MANY),
        case("all_reduce_max(torch.zeros(3 + rank))", "RuntimeError", "`structure` differs",
             "value: 3", "value: 4", sizes=MANY),
    ],
    "all_reduce_min": [
        case("all_reduce_min(None)", "TypeError",
             "`value` must be a number or a tensor, but is None"),
        case("all_reduce_min(1.0) if rank == 0 else all_reduce_max(1.0)", "RuntimeError",
             "`call` differs", "all_reduce_min", "all_reduce_max", sizes=MANY),
    ],
    "broadcast": [
        case("broadcast(threading.Lock())", "TypeError", "cannot pickle '_thread.lock' object",
             sizes=MANY, label="what cannot be pickled"),
        case("broadcast(1) if rank == 0 else all_gather(1)", "RuntimeError", "`call`",
             "call='broadcast'", "call='all_gather'", sizes=MANY),
    ],
    "all_gather": [
        case("all_gather(threading.Lock())", "TypeError", "cannot pickle '_thread.lock' object",
             label="what cannot be pickled"),
        case("all_gather('text' if rank == 0 else 1)", "RuntimeError", "`structure` differs",
             "no tensor or number", "number of torch.int64", sizes=MANY),
        case("all_gather(torch.zeros(2, 3 + rank))", "RuntimeError", "`structure` differs",
             "rowsx3", sizes=MANY),
        case("all_gather(1.0 if rank == 0 else 1)", "RuntimeError", "`structure` differs",
             "float64", "int64", sizes=MANY),
    ],
    "barrier": [
        case("barrier('data' if rank == 0 else 'epoch')", "RuntimeError",
             "every rank must make the same calls in the same order", "barrier('data')",
             "barrier('epoch')", sizes=MANY),
        case("barrier(timeout='5')", "TypeError",
             "`timeout` must be seconds or a datetime.timedelta, but is '5': pass 300, say"),
        case("barrier(timeout=timedelta(-1))", "ValueError",
             "`timeout` must be more than 0 seconds, up to three years, but is -86400"),
    ],
    "rank_zero_call": [
        # Rank 0 first: where the others are there before it, all are told, with a table.
        case("(rank_zero_call(min, 1, 2), torch.distributed.barrier()) if rank == 0 else "
             "(torch.distributed.barrier(), rank_zero_call(max, 1, 2))", "RuntimeError",
             "rank 0 is in rank_zero_call(min) and rank", "rank_zero_call(max)", sizes=MANY,
             ranks=(1, 2), label="`rank_zero_call(min if rank == 0 else max, 1, 2)`"),
        case("rank_zero_call(fails)", "OSError", "no disk"),
        case("rank_zero_call(threading.Lock)", "TypeError", "cannot pickle '_thread.lock' object",
             sizes=MANY, label="a result that cannot be pickled"),
    ],
    "rank_zero_first": [
        case("first(fails)", "OSError", "no disk"),
        case("first(lambda: sys.exit('no disk'))", "SystemExit", "no disk"),
    ],
    "seed_everything": [
        case("seed_everything('0')", "TypeError", "`seed` must be an integer, but is '0'"),
        case("seed_everything(1.0)", "TypeError", "`seed` must be an integer, but is 1.0"),
        case("seed_everything(-1)", "ValueError", "between 0 and 2**63 - 1, but is -1"),
        case("seed_everything(2**63)", "ValueError", "between 0 and 2**63 - 1, but is 9223"),
        case("seed_everything(0, per_rank='no')", "TypeError",
             "`per_rank` must be True or False, but is 'no'"),
        case("seed_everything(0, deterministic=1)", "TypeError",
             "`deterministic` must be True or False, but is 1"),
    ],
    "get_logger": [
        case("get_logger(5)", "TypeError", "logger name must be a string", ours=False),
        case("logged(ranks='rank 0')", "ValueError",
             "`ranks` must be 'all' or a list of ranks, but is 'rank 0'",
             label="`log.warning('a line', ranks='rank 0')`"),
        case("logged(ranks=0)", "ValueError", "`ranks` must be 'all' or a list of ranks, but is 0",
             label="`log.warning('a line', ranks=0)`"),
    ],
    "progress": [
        case("progress(5)", "TypeError", "`iterable` must be something to iterate over, but is 5"),
        case("progress([1], total='all')", "TypeError",
             "`total` must be an integer of at least 0, but is 'all'"),
        case("progress([1], batch_size=-1)", "ValueError",
             "`batch_size` must be an integer of at least 0, but is -1"),
        case("shown(loss=torch.ones(3))", "TypeError", "`loss` must be one number to be shown, but "
             "is a tensor of 3", label="`bar.show(loss=torch.ones(3))`"),
    ],
    "MetricWriter": [
        case("MetricWriter(__file__)", "FileExistsError", "File exists", ranks=(0,), ours=False,
             label="`MetricWriter(a_file)`"),
        case("MetricWriter('run', after=0.5)", "TypeError", "`after` must be an integer, but is "
             "0.5: pass a whole number"),
        case("written('1', {'loss': 1.0})", "TypeError",
             "`step` must be an integer, but is '1': pass a whole number",
             label="`writer.write('1', {'loss': 1.0})`"),
        case("written(1, [1.0])", "TypeError", "`values` must map names to numbers, but is [1.0]",
             label="`writer.write(1, [1.0])`"),
        case("written(1, {3: 1.0})", "TypeError", "`values` must map names to numbers",
             label="`writer.write(1, {3: 1.0})`"),
        case("written(1, {'step': 1.0})", "ValueError", '`values` must not have a "step"',
             label="`writer.write(1, {'step': 1.0})`"),
        case("written(1, {'loss': torch.ones(2)})", "TypeError",
             "`values['loss']` must be one number", ranks=(0,),
             label="`writer.write(1, {'loss': torch.ones(2)})`"),
        case("written(1, {'loss': 10**400})", "OverflowError", "int too large to convert to float",
             ranks=(0,), ours=False, label="`writer.write(1, {'loss': 10**400})`"),
    ],
    "testing.run": [
        case("run(max, 1, 2, world_size=0)", "ValueError",
             "`world_size` must be an integer of at least 1, but is 0: pass a wh", sizes=ONE),
        case("run(max, 1, 2, world_size='2')", "TypeError",
             "`world_size` must be an integer of at least 1, but is '2'", sizes=ONE),
        case("run(max, 1, 2, timeout=0)", "ValueError",
             "`timeout` must be more than 0 seconds, up to three years, but is 0", sizes=ONE),
        case("run(max, 1, 2, timeout=float('nan'))", "ValueError", "`timeout` must be", "is nan",
             sizes=ONE),
        case("run(max, 1, 2, timeout=None)", "TypeError", "`timeout` must be", "is None",
             sizes=ONE),
        case("run(max, 1, 2, env={'OMP_NUM_THREADS': 1})", "TypeError", "`env` must map names to "
             "text, but maps 'OMP_NUM_THREADS' to 1: use str()", sizes=ONE),
        case("run(lambda: 1)", "TypeError",
             "`fn` and its arguments must be importable and picklable", sizes=ONE, ours=False),
    ],
    "testing.assert_same_at_every_world_size": [
        case("assert_same_at_every_world_size(steps, sizes=(1,))", "ValueError",
             "`sizes` must be two or more, to be compared, but is [1]", sizes=ONE),
        case("assert_same_at_every_world_size(steps, sizes=2)", "TypeError",
             "'int' object is not iterable", sizes=ONE),
        case("assert_same_at_every_world_size(steps, rtol=-1)", "ValueError",
             "`rtol` must be a finite number from 0 up, but is -1: pass 1e-6, say", sizes=ONE),
        case("assert_same_at_every_world_size(steps, atol='0')", "ValueError",
             "`atol` must be a finite number from 0 up, but is '0'", sizes=ONE),
    ],
}  # fmt: skip
