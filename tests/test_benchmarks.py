"""The benchmarks count right, and what they count holds. No times here."""

import statistics

import mlx.core as mx
import mlx.optimizers as optim
import pytest
from mlx.utils import tree_flatten

from benchmarks import (
    by_optimizer,
    comparison,
    cost,
    counting,
    counts,
    growth,
    machine,
    report,
    timing,
    torch_peer,
    trees,
    variants,
)
from benchmarks.__main__ import main
from benchmarks.drawing import PICTURES
from benchmarks.results import Results
from benchmarks.rows import Figure, Point, Section, rows_of
from benchmarks.sections import FULL, QUICK
from benchmarks.variants import ELEMENTWISE, OPTIMIZERS

SHAPES = [(8, 8)] * 4


def evaluated(*shape: int) -> mx.array:
    x = mx.ones(shape)
    mx.eval(x)
    return x


def test_counts_each_kernel_once_and_no_view():
    x = evaluated(4, 6)
    y = mx.exp(x).T.reshape(-1)[3:].view(mx.uint32)
    assert counting.kernels([y, y]) == {"Exp": 1}


def test_counts_a_fused_chain_as_one_kernel():
    fused = mx.compile(lambda x: mx.sum(mx.exp(x) * 2 + 1))
    assert counting.kernels([fused(evaluated(8))]).total() == 2


def test_counts_the_kernels_of_inputs_that_were_not_evaluated():
    assert counting.kernels([mx.exp(mx.sin(evaluated(8)))]).total() == 2


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_the_guarded_update_is_one_kernel_per_leaf(name):
    assert counts.update_kernels_per_leaf(name) == 1
    assert counts.bare_kernels_per_leaf(name) >= 1


def test_a_where_on_every_output_is_more_kernels():
    # What the count is there to catch: the way that promise 4 rules out.
    make = OPTIMIZERS["AdamW"]
    plain = counting.kernels(variants.plain_where(make, SHAPES).start()).total()
    ours = counting.kernels(variants.scaler(make, SHAPES).start()).total()
    assert plain - 4 * len(SHAPES) > len(SHAPES)
    assert ours < plain


def test_the_finite_check_is_a_quarter_of_a_kernel_per_leaf():
    few, many = (counts.check_kernels([(8, 8)] * n) for n in (64, 128))
    assert 0 < many - few <= 0.25 * 64


def test_gradients_in_half_precision_cost_no_kernel_more():
    make = OPTIMIZERS["AdamW"]
    single, half = (
        counting.kernels(variants.scaler(make, SHAPES, dtype).start()).total()
        for dtype in (mx.float32, mx.float16)
    )
    # One conversion of the largest value; nothing per leaf.
    assert half <= single + 1


def test_masters_and_clipping_stay_one_trace():
    def make(*args):
        half = {"dtype": mx.float16, "model_dtype": mx.float16}
        return variants.loss_scale_optimizer(*args, clip=True, **half)

    assert counts.traces(make) == 1
    assert counts.traces(variants.scaler) == 1


def test_the_trace_count_counts():
    phase = variants.bare(OPTIMIZERS["SGD"], SHAPES, compiled=False)
    phase.run()
    phase.run()
    assert phase.traces == 2


def test_every_variant_moves_the_parameters_alike():
    def step(make, *args, **kwargs):
        mx.random.seed(1)
        phase = make(OPTIMIZERS["SGD, momentum"], SHAPES, *args, **kwargs)
        before = phase.state[0]["layer0"]["weight"]
        phase.run()
        return before - phase.state[0]["layer0"]["weight"]

    wanted = step(variants.bare)
    for make in (variants.scaler, variants.by_hand, variants.plain_where):
        assert mx.allclose(step(make), wanted, rtol=1e-3, atol=1e-7)
    half = {"dtype": mx.float16, "model_dtype": mx.float16}
    masters = step(variants.loss_scale_optimizer, **half)
    assert mx.allclose(masters, step(variants.bare_masters), atol=2e-3)
    clipped = step(variants.loss_scale_optimizer, clip=True)
    assert mx.allclose(clipped, step(variants.bare_clipped), rtol=1e-3, atol=1e-7)


def test_no_variant_holds_old_buffers():
    make, shapes = OPTIMIZERS["AdamW"], [(64, 64)] * 8
    for build in (variants.bare, variants.scaler, variants.loss_scale_optimizer):
        phase = build(make, shapes)
        phase.run()
        alive = mx.get_active_memory()
        phase.run()
        phase.run()
        assert mx.get_active_memory() <= alive


def test_peak_memory_stays_within_two_percent():
    (figure,) = counts.memory_figures()
    assert figure.met, figure
    assert figure.value >= 1


def test_peak_memory_sees_a_buffer():
    x = evaluated(1024, 1024)
    before = mx.get_active_memory()
    peak = counting.peak_bytes(lambda: mx.eval(mx.exp(x)))
    assert peak - before >= x.nbytes


def test_ratios_and_differences_are_paired_by_round():
    found = timing.Timing([2.0, 40.0, 4.0], [1.0, 20.0, 4.0])
    assert found.ratio == 2.0
    assert found.added == 1.0
    assert found.median == statistics.median([2.0, 40.0, 4.0])
    assert found.spread == (1.5, 2.0)


def test_interleaving_runs_every_variant_in_every_round():
    calls = []
    runs = {name: lambda name=name: calls.append(name) for name in "ab"}
    found = timing.interleave(runs, rounds=3, warm_up=1)
    assert "".join(calls) == "ab" + "ab" * 3
    assert [len(found[name].seconds) for name in "ab"] == [3, 3]


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_the_exponent_is_the_slope_of_two_logarithmic_axes(power):
    amounts = [1.0, 10.0, 256.0]
    found = timing.exponent(amounts, [3 * amount**power for amount in amounts])
    assert found == pytest.approx(power)


def test_trees_are_what_they_are_called():
    assert trees.size(trees.shapes_of(trees.MAIN)) == 8_000_000
    assert {trees.size([s]) for s in trees.shapes_of(trees.LORA)} == {16_000}
    assert len({len(s) for s in trees.transformer_shapes(2, 32)}) > 1


def test_a_leaf_larger_than_what_is_drawn_is_filled(monkeypatch):
    monkeypatch.setattr(trees, "_DRAWN", 16)
    leaf = trees.make([(7, 9)])["layer0"]["weight"]
    assert leaf.shape == (7, 9)
    flat = leaf.reshape(-1)
    assert mx.array_equal(flat[:16], flat[16:32])
    assert mx.array_equal(flat[48:], flat[:15])
    assert len(set(flat[:16].tolist())) == 16


def test_every_optimizer_of_mlx_is_measured():
    kinds = {
        kind
        for kind in vars(optim.optimizers).values()
        if isinstance(kind, type) and issubclass(kind, optim.Optimizer)
    }
    assert {type(make()) for make in OPTIMIZERS.values()} == kinds - {optim.Optimizer}


def test_both_parts_of_the_multi_optimizer_have_parameters():
    optimizer = OPTIMIZERS["MultiOptimizer"]()
    optimizer.init(trees.make(SHAPES))
    leaves = [
        sum(x.shape == SHAPES[0] for _, x in tree_flatten(part.state))
        for part in optimizer.optimizers
    ]
    assert leaves == [4, 2]  # AdamW's two moments of two leaves, and Lion's one.


def test_the_limit_counts_the_state():
    limits = {name: by_optimizer.limit(name) for name in OPTIMIZERS}
    assert limits["AdamW"] == 8 / 7
    assert limits["Lion"] == limits["SGD, momentum"] == 6 / 5
    assert limits["SGD"] == 4 / 3
    assert limits["Muon"] is limits["Adafactor"] is None


def test_growth_has_a_point_for_each_variant_and_size():
    found = growth.measure(2, [(8, 8), (8, 16)], [4, 8])
    variants_found = ("bare", "LossScaleOptimizer")
    for axis, amounts, copies in (
        ("parameters", [2048, 4096], 3),
        ("leaves", [4, 8], 4),
    ):
        points = [p for p in found.points if p.axis == axis]
        assert [(p.amount, p.variant) for p in points] == [
            (amount, name) for amount in amounts for name in variants_found
        ]
        for point in points:
            values = point.amount * (64 if axis == "leaves" else 1)
            # Parameters, gradients and one or two moments are there at least.
            assert point.peak_bytes >= 4 * copies * values
            assert point.first_call > 0 < point.milliseconds
    assert len(found.figures) == 2 * 3 * 2


def test_growth_reports_the_exponent_beside_that_of_bare():
    points = [
        Point(axis, n, variant, n**power, 5 * n**power, n)
        for axis in ("parameters", "leaves")
        for n in (1, 10, 100)
        for variant, power in (("bare", 1), ("LossScaleOptimizer", 1.5))
    ]
    found = {figure.name: figure for figure in growth.figures(points)}
    assert found["time per step by leaves: exponent"].value == pytest.approx(1.5)
    assert found["time per step by leaves: exponent"].note == "bare 1.00"
    assert found["first call, 100 leaves / bare"].value == pytest.approx(10)
    assert found["peak memory, 100 parameters / bare"].value == 1


@pytest.mark.parametrize(("built", "made"), [([5, 5], 1), ([5, 7, 7, 7], 2)])
def test_a_first_call_that_builds_kernels_is_done_again(monkeypatch, built, made):
    phases = []
    monkeypatch.setattr(growth, "_kernels_on_disk", iter(built).__next__)

    def build():
        phases.append(variants.bare(OPTIMIZERS["SGD"], SHAPES, compiled=False))
        return phases[-1]

    phase, _ = growth._first_call(build)
    assert len(phases) == made
    assert phase is phases[-1]


def test_torch_is_measured_as_we_are(monkeypatch):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    before, threads = torch.get_num_threads(), []

    def interleave(*args, **kwargs):
        threads.append(torch.get_num_threads())
        return timing.interleave(*args, **kwargs)

    monkeypatch.setattr(torch_peer, "interleave", interleave)
    found = torch_peer.measure(2, SHAPES)
    assert threads == [machine.THREADS]
    assert torch.get_num_threads() == before
    assert list(found.cases()) == [torch_peer.OURS, *torch_peer.KINDS]
    for bare, scaled in found.cases().values():
        assert (bare.ratio, bare.added) == (1, 0)
        assert scaled.variant == torch_peer.SCALED
    added = [f for f in found.figures if "scaler adds" in f.name]
    assert [f.unit for f in added] == ["ms", "%"] * 4
    assert found.figures[-1].bar == 1.0


@pytest.mark.parametrize("kind", torch_peer.KINDS)
def test_torch_steps_the_same_with_and_without_its_scaler(kind):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    results = []
    for scaled in (False, True):
        torch.manual_seed(0)
        peer = torch_peer._Peer(torch, SHAPES, torch_peer.KINDS[kind], scaled)
        for _ in range(3):
            peer.refill()
            peer.run()
        results.append(torch.stack([p.detach() for p in peer.parameters]))
    assert torch.allclose(*results, rtol=1e-5, atol=1e-7)
    torch.manual_seed(0)
    start = torch_peer._Peer(torch, SHAPES, {}, False).parameters
    assert not torch.equal(torch.stack([p.detach() for p in start]), results[0])


def test_without_torch_its_rows_are_left_out_with_a_line(monkeypatch, capsys):
    monkeypatch.setattr(torch_peer, "available", lambda: False)
    assert torch_peer.measure(2, SHAPES) == Section()
    assert "pip install 'mlx_gradscale[torch]'" in capsys.readouterr().out


def test_the_machine_is_named():
    found = machine.describe()
    assert found["processor"]
    assert found["system"]
    assert (found["mlx"], found["threads"]) == (mx.__version__, 1)
    line = machine.in_a_line(found)
    for part in ("processor", "cores", "threads", "mlx", "system"):
        assert str(found[part]) in line


def test_results_come_back_from_their_file(tmp_path):
    timings = timing.interleave({"a": lambda: None, "b": lambda: None}, 2)
    figures = [Figure("counted", 3, bar=2, counted=True), Figure("plain", 0.5)]
    points = [Point("leaves", 10, "bare", 1.0, 2.0, 3)]
    section = Section(rows_of("case", timings), figures, points)
    results = Results(machine.describe(), {"one": section, "empty": Section()})
    results.save(tmp_path / "results.json")
    assert Results.load(tmp_path / "results.json") == results
    assert results.wrong_counts() == figures[:1]


def test_reports_hold_every_number():
    timings = timing.interleave({"a": lambda: None, "b": lambda: None}, 2)
    figures = [Figure("counted", 3, bar=2, counted=True), Figure("plain", 0.5)]
    points = [Point("leaves", 1000, "bare", 1.0, 2000.0, 3_000_000)]
    text = report.section("name", Section(rows_of("case", timings), figures, points))
    assert "| counted | 3 | 2 | missed |" in text
    assert "| 1,000 leaves | bare | 1.00 | 2.000 | 3.0 |" in text
    assert text.count("\n| case | ") == 3  # The head and two rows.


def test_the_quick_sections_and_the_pictures_are_of_the_suite():
    assert set(QUICK) <= set(FULL)
    assert {section for section, _ in PICTURES.values()} <= set(FULL)


def test_a_wrong_count_fails_the_command(monkeypatch, capsys):
    wrong = Section(figures=[Figure("kernels", 2, bar=1, counted=True)])
    monkeypatch.setitem(QUICK, "counts", lambda rounds: wrong)
    assert main(["--quick", "--only", "counts"]) == 1
    printed = capsys.readouterr()
    assert "kernels is 2, at most 1" in printed.out
    assert f"processor: {machine.processor()}" in printed.out
    assert "== counts" in printed.err


def test_a_slow_machine_does_not_fail_the_command(monkeypatch):
    slow = Section(figures=[Figure("seconds", 2.0, bar=1.0)])
    monkeypatch.setitem(QUICK, "counts", lambda rounds: slow)
    assert main(["--quick", "--only", "counts"]) == 0


def test_a_run_that_is_stopped_has_written_what_it_had(monkeypatch, tmp_path):
    def stopped(rounds):
        raise KeyboardInterrupt

    done = Section(figures=[Figure("kernels", 1, bar=1, counted=True)])
    monkeypatch.setitem(QUICK, "counts", lambda rounds: done)
    monkeypatch.setitem(QUICK, "cost", stopped)
    path = tmp_path / "results.json"
    with pytest.raises(KeyboardInterrupt):
        main(["--quick", "--only", "counts", "cost", "--json", str(path)])
    assert Results.load(path).sections == {"counts": done}


def test_a_section_that_quick_has_not_is_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--quick", "--only", "first-call"])
    assert "leave out --quick" in capsys.readouterr().err


def test_each_kind_of_masters_is_measured_with_both_kinds_of_gradients(monkeypatch):
    assert list(cost.masters_ways(SHAPES, clip=False)) == [
        "bare on masters + cast",
        "LossScaleOptimizer",
        "with scaled gradients",
        "masters=remainder",
        "masters=remainder, scaled",
    ]
    monkeypatch.setitem(cost.KINDS_OF_MASTERS, "another", {"max_grad_norm": 2.0})
    # What a kind is given reaches the optimizer: two norms are one too many.
    with pytest.raises(TypeError, match="max_grad_norm"):
        cost.masters_ways(SHAPES, clip=True)["another"]()


def test_a_comparison_gives_its_memory_back():
    makers = {"bare": lambda: variants.bare(OPTIMIZERS["SGD"], [(256, 256)])}
    comparison.compare("case", makers, 2)
    before = mx.get_active_memory()
    rows = comparison.compare("case", makers, 2)
    assert mx.get_active_memory() <= before
    assert mx.get_cache_memory() == 0
    assert [(row.case, row.variant) for row in rows] == [("case", "bare")]
