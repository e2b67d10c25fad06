"""The benchmark of the output layer runs, and no contender can end it or count as right when it is wrong."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.output_layer import __main__ as program
from benchmarks.output_layer import bars, contenders, options, peers, problems, products, report, sweep
from benchmarks.output_layer.contenders import Contender, Run
from benchmarks.output_layer.measuring import Entry, equivalent_tflops, reason_of
from benchmarks.output_layer.problems import Problem, Spec
from benchmarks.output_layer.profiling import kernel_us_within, peak_cpu_bytes
from benchmarks.output_layer.session import Session, loss_contenders, run_cpu

from tests.closeness import assert_as_close

TINY = Spec("B", 32, 16, 128, dtype=torch.float32)


@pytest.fixture(autouse=True)
def _keep_tf32_setting() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_quick_run_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "numbers.json"
    program.main(["--quick", "--shapes", "A,C", "--json", str(path), "--commit", "abc"])
    record = json.loads(path.read_text())
    assert {"date", "device", "torch", "triton", "python", "commit", "command", "entries"} <= set(record)
    assert record["commit"] == "abc"
    assert str(tmp_path) not in path.read_text()
    found = {(e["shape"], e["logits"], e["contender"]): e for e in record["entries"]}
    assert {e["shape"] for e in record["entries"]} == {"A", "C"}
    for name in ("ours", "eager", "chunked torch loop"):
        entry = found["C", "random", name]
        assert entry["status"] == "ok", entry
        assert entry["eq_tflops"] == pytest.approx(6 * 32 * 16 * 203 / entry["median_ms"] / 1e9)
        assert entry["relative_errors"]["dW_any"] < 1e-4
    best = max(found["C", "random", p.name]["eq_tflops"] for p in products.PRODUCTS)
    ours = found["C", "random", "ours"]
    assert ours["share_of_product"] == pytest.approx(ours["eq_tflops"] / best)
    assert sorted(ours["samples_ms"])[len(ours["samples_ms"]) // 2] == pytest.approx(ours["median_ms"], rel=0.5)
    for peer in (*peers.CUTE, peers.LIGER, peers.CUT_EXACT):
        assert found["C", "random", peer.name]["status"] == "skipped", peer
    assert found["A", "random", "step, RMSprop (foreach) + write"]["write_adds_ms"] is not None
    assert 0.4 < record["mean_target_probability"][replace(problems.QUICK[0], logits="peaked").title()] < 0.95
    table = capsys.readouterr().out
    assert "C: 32 x 16 x 203, float32, random logits" in table
    assert "eager, padded (bias of -inf)" in table


def broken(problem: Problem) -> tuple[Run, str]:
    raise RuntimeError("out of luck at /some/machine/path/file.py\nsecond line")


def breaks_later(problem: Problem) -> tuple[Run, str]:
    run, note = contenders.plain(contenders.eager)(problem)
    calls = iter(range(3))
    return lambda: (next(calls), run())[1], note


def wrong(problem: Problem) -> tuple[Run, str]:
    run, note = contenders.plain(contenders.eager)(problem)

    def doubled() -> contenders.Gradients:
        loss, dh, dw = run()
        return loss, dh, 2 * dw

    return doubled, note


@pytest.mark.parametrize("together", [False, True])
def test_what_a_contender_raises_is_reported_and_the_run_goes_on(together: bool) -> None:
    session = Session("cpu", seconds=0.01)
    right = contenders.plain(contenders.eager)
    builds = {"broken": broken, "later": breaks_later, "wrong": wrong, "missing": peers.liger, "right": right}
    session.part(TINY, [Contender(name, "peer", build) for name, build in builds.items()], together)
    entries = {entry.contender: entry for entry in session.entries}
    statuses = {"broken": "failed", "later": "failed", "wrong": "wrong", "missing": "skipped", "right": "ok"}
    assert {name: entry.status for name, entry in entries.items()} == statuses
    assert entries["broken"].reason == "RuntimeError: out of luck at file.py"
    assert "off by 100 %" in entries["wrong"].reason
    assert entries["later"].ms is None
    assert entries["right"].ms is not None


def test_a_spent_budget_skips_what_remains() -> None:
    session = Session("cpu", budget=-1.0)
    session.part(TINY, [contenders.TORCH[0]])
    assert session.entries[0].status == "skipped"
    assert session.entries[0].reason == "budget of -1 s spent"


def test_a_padded_problem_has_the_same_loss_and_gradients() -> None:
    problem = problems.draw(replace(TINY, classes=99), "cpu")
    wide = problem.padded
    assert len(wide.weight) == 256
    h, weight = (each.detach().double().requires_grad_() for each in (problem.h, problem.weight))
    exact = replace(problem, h=h, weight=weight)
    for loss in (contenders.eager, contenders.chunked_loop):
        found, expected, truth = (contenders.differentiate(loss, each)() for each in (wide, problem, exact))
        for results in zip((found[0], found[1], found[2][:99]), expected, truth, strict=True):
            assert_as_close(*results)


def test_liger_chunks_follow_its_rule() -> None:
    problem = Problem(problems.C, *(torch.empty(s, device="meta") for s in ((4096, 512), (267_735, 512), (4096,))))
    assert peers.liger_chunk(problem, 1) == 8
    assert peers.liger_chunk(problem, 128) == 1024


def test_equivalent_tflops() -> None:
    assert problems.A.flops == 6 * 51_200 * 2_048 * 267_735
    assert equivalent_tflops(problems.A.flops, 213.2) == pytest.approx(790, rel=1e-2)


def test_reason_names_no_path() -> None:
    assert reason_of(ImportError("no name (/tmp/a/b-1/c.py)")) == "ImportError: no name (c.py)"
    assert reason_of(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 25.53 GiB. GPU 0")) == (
        "out of memory (asked for 25.53 GiB more)"
    )


def entry(spec: Spec, name: str, kind: str, ms: float | None, **more: Any) -> Entry:
    return Entry(spec, name, kind, ms=ms, **more)


def verdicts(*runs: list[Entry]) -> dict[str, bars.Bar]:
    return {bar.what: bar for bar in bars.check(list(runs))}


def test_bars() -> None:
    b = problems.B
    entries = [
        entry(b, "ours", "ours", 2.5, extra_bytes=400_000_000),
        entry(b, "product, square", "product", 2.1),
        entry(b, "eager", "peer", 3.0),
        entry(b, "too good", "peer", 1.0, status="wrong"),
        entry(b, "Cut Cross-Entropy", "approximate", 1.0),
        entry(b, "Liger, best chunk", "tuned", 2.4),
        entry(b, "step, RMSprop (foreach)", "step", 3.0),
        entry(b, "step, RMSprop (foreach) + write", "step with write", 3.2, rule_ms=0.059),
    ]
    found = verdicts(entries)
    for what, passed, value in (
        ("B: share of the best product (dW in bf16)", True, "84.0 %"),
        ("B: the rule's kernels", True, "medians of the steps differ by 200 us"),  # 1.8 % of the step, but below 60 us.
        ("B: against the fastest exact peer as it comes (dW in bf16)", True, "1.200x (eager"),
        ("B: against the fastest tuned, padded or hand-written one (dW in bf16)", False, ""),
        ("B: against the fastest tuned, padded or hand-written one", None, ""),
        ("B: extra memory (dW in bf16)", True, ""),
        ("A: extra memory", None, ""),
    ):
        assert found[what].passed is passed, what
        assert value in found[what].value
    assert found["A: extra memory"].line().strip().startswith("not measured")
    longer = entry(b, "step, Adam (fused) + write", "step with write", 3.9, rule_ms=0.061)  # Too long.
    rule = verdicts([*entries, longer])["B: the rule's kernels"]
    assert rule.passed is False
    assert "(61.0 us) of step, Adam (fused) + write" in rule.value


def test_bars_of_large_models_need_a_share_of_the_product_only_without_fused_peers() -> None:
    d, name = problems.D, "ours, fp32 master"
    ours, product = entry(d, name, "ours", 20.0), entry(d, "product, square", "product", 18.0)
    alone = verdicts([ours, product, entry(d, "torch.compile", "peer", 30.0)])
    assert alone["D: share of the best product"].passed is False  # 90 %
    assert alone["D: against the fastest exact one that runs"].passed is True
    beside = verdicts([ours, product, entry(d, peers.QUACK.name, "peer", 19.0)])
    assert "D: share of the best product" not in beside
    assert beside["D: against the fastest exact one that runs"].passed is False  # 0.95


def test_bars_compare_a_gradient_in_bf16_with_its_like_and_one_in_fp32_with_all() -> None:
    d, whom = problems.D16, "D16: against the fastest exact one that runs"
    ours = [entry(d, "ours, fp32 master", "ours", 10.0), entry(d, "ours", "ours", 11.0)]
    fp32 = entry(d, peers.QUACK_FP32.name, "tuned", 9.0)
    found = verdicts([*ours, fp32, entry(d, peers.QUACK_TUNED.name, "tuned", 12.0)])
    assert found[whom].value.startswith("0.900x (QuACK, dW in fp32")
    assert found[whom].passed is False
    assert found[f"{whom} (dW in bf16)"].value.startswith("1.091x (QuACK, best chunk")
    assert found[f"{whom} (dW in bf16)"].passed is True
    shown = found["D16: dW in bf16 against the fastest with dW in fp32"]
    assert shown.passed is None
    assert shown.line().strip().startswith("no bar  D16")
    assert "0.818x (QuACK, dW in fp32, 9.00 ms against 11.00)" in shown.line()
    faster = verdicts([*ours, entry(d, peers.QUACK_TUNED.name, "tuned", 9.0)])
    assert faster[whom].passed is False  # Less to write is no excuse.
    padded = entry(problems.A, f"{peers.QUACK_FP32.name}, padded (zero rows)", "padded", 9.0)
    known = verdicts([entry(problems.A, "ours", "ours", 10.0), padded])
    assert known["A: against the fastest tuned, padded or hand-written one (dW in bf16)"].passed is None


def test_bars_compare_within_a_run_and_take_the_worst_of_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    d, name = problems.D, "ours, fp32 master"
    first = [entry(d, name, "ours", 20.0), entry(d, "torch.compile", "peer", 20.0)]
    second = [entry(d, name, "ours", 10.0), entry(d, peers.QUACK.name, "peer", 9.7)]
    bar = verdicts(first, second)["D: against the fastest exact one that runs"]
    assert bar.value.startswith("0.970x (QuACK, 9.70 ms against 10.00")
    paths = []
    for number, run in enumerate((first, second)):
        paths.append(str(tmp_path / f"{number}.json"))
        Path(paths[-1]).write_text(json.dumps({"entries": [report.record_of(each, run) for each in run]}))
    bars.main(paths)
    assert bar.line() in capsys.readouterr().out


def test_a_published_time_is_shown_where_a_peer_does_not_run_and_counts_nowhere() -> None:
    absent = entry(problems.D, peers.QUACK.name, "peer", None, status="skipped", reason="absent")
    assert "published, not measured here: 16.8 ms on an H200" in report.table([absent], {})
    assert report.record_of(absent, [absent])["published_ms"] == 16.8
    ours = entry(problems.D, "ours", "ours", 20.0)
    assert verdicts([ours, absent])["D: against the fastest exact one that runs (dW in bf16)"].passed is None


def test_a_peer_that_fails_is_shown_with_its_reason_and_has_no_bar() -> None:
    failed = entry(problems.D, peers.QUACK.name, "peer", None, status="failed", reason="ValueError: m == n")
    told = "failed: ValueError: m == n (published, not measured here: 16.8 ms on an H200)"
    assert told in report.table([failed], {})
    bar = verdicts([failed, entry(problems.D, "ours", "ours", 20.0)])["D: QuACK"]
    assert bar.line().strip() == f"no bar  D: QuACK: {told}"
    others = [entry(problems.A, each, "peer", None, status="failed", reason="out of memory") for each in ("x", "y")]
    assert {"A: x", "A: y"} <= verdicts([*others, *others]).keys()


def test_a_smaller_workspace_is_measured_at_b_and_has_no_bar() -> None:
    name = contenders.SMALLER_WORKSPACE.name
    shapes = [s.name for s in problems.CUDA if name in {c.name for c in loss_contenders(s, compiles=False)}]
    assert shapes == ["B"]
    smaller = entry(problems.B, name, contenders.SMALLER_WORKSPACE.kind, 1.0, extra_bytes=10**12)
    assert all(bar.passed is None for bar in bars.check([[smaller]]))
    session = Session("cpu", seconds=0.01)
    session.part(TINY, [contenders.SMALLER_WORKSPACE])
    assert session.entries[0].status == "ok"


@pytest.mark.parametrize("spec", [*problems.CUDA, *problems.QUICK], ids=lambda spec: f"{spec.name}-{spec.n}")
def test_the_square_product_is_about_as_long_as_the_problem(spec: Spec) -> None:
    assert 0.6 < products.square_operations(spec) / spec.flops < 1.6


def test_quack_gets_no_chunk_beyond_its_offsets() -> None:
    def chunks(spec: Spec) -> list[int]:
        shapes = (spec.n, spec.features), (spec.classes + 41, spec.features), (spec.n,)
        return peers.quack_chunks(Problem(spec, *(torch.empty(shape, device="meta") for shape in shapes)))

    assert chunks(problems.A) == [1024, 2048, 4096]
    assert chunks(problems.D1) == [1024]


def test_sweep_runs_and_names_the_threshold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep.main(["--quick", "--seconds", "0.001", "--json", str(tmp_path / "sweep.json")])
    assert "best threshold" in capsys.readouterr().out
    for problem in json.loads((tmp_path / "sweep.json").read_text())["problems"]:
        assert problem["device_ms"].keys() == {"auto", "reference", "chunked", "eager"}
    for device in ("cpu", "cuda"):
        grid = sweep.problems(device, quick=False)
        assert len(set(grid)) == len(grid) <= 80


def test_options_run_beside_the_plain_loss(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options.main(["--quick", "--json", str(tmp_path / "options.json")])
    entries = json.loads((tmp_path / "options.json").read_text())["entries"]
    assert {e["status"] for e in entries} == {"ok"}, entries
    assert "linear_log_prob, entropy" in capsys.readouterr().out


def test_kernels_are_counted_by_the_range_they_are_launched_in() -> None:
    def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}

    events = [
        event("user_annotation", "rule", 10, 10),
        event("user_annotation", "rule", 12, 2),  # Nested ranges count once.
        event("gpu_user_annotation", "rule", 30, 500, tid=7),
        event("cuda_runtime", "cudaLaunchKernel", 11, 1, correlation=1),
        event("cuda_driver", "cuLaunchKernel", 15, 1, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 25, 1, correlation=3),
        event("cuda_runtime", "cudaLaunchKernel", 15, 1, tid=2, correlation=4),
        event("cpu_op", "aten::sort", 16, 1, **{"External id": 9}),
        event("kernel", "a", 40, 5, tid=7, correlation=1),
        event("gpu_memset", "b", 45, 2, tid=7, correlation=2),
        event("kernel", "later", 50, 100, tid=7, correlation=3),
        event("kernel", "another thread's", 150, 100, tid=7, correlation=4),
        event("kernel", "by its operation", 250, 3, tid=7, correlation=5, **{"External id": 9}),
    ]
    assert kernel_us_within(events, ["rule"]) == 10
    with pytest.raises(LookupError, match="no profiler range"):
        kernel_us_within(events, ["absent"])
    with pytest.raises(LookupError, match="no kernels"):
        kernel_us_within([e for e in events if "kernel" not in e["cat"] and "gpu" not in e["cat"]], ["rule"])


def test_memory_on_a_cpu() -> None:
    """At most two of three buffers are alive at a time; memory held before does not count."""
    torch.zeros(10_000)

    def run() -> Any:
        first = torch.zeros(250_000)
        second = first + 1
        del first
        return second * 2

    found = peak_cpu_bytes(run)
    assert 2e6 <= found < 2.1e6


def test_on_a_cpu_losses_and_whole_steps_are_measured() -> None:
    session = Session("cpu", seconds=0.01)
    run_cpu(session, [Spec("1", 8, 16, 50, dtype=torch.float32)], compiles=False)
    timed = {entry.contender for entry in session.entries if entry.ms is not None}
    assert {"ours", "eager", "step, RMSprop (foreach)", "step, RMSprop (foreach) + write"} <= timed
    assert "torch.compile" not in {entry.contender for entry in session.entries}
    assert not any(entry.status == "failed" for entry in session.entries)
