"""Held-out loss of FP8 against stock bf16 on real text, in paired runs: the parity studies. Writes dated result files.

    python benchmarks/gpt_parity.py --study recipes --compile          # every recipe and state format, 124 M parameters
    python benchmarks/gpt_parity.py --study 1b --arms stock --compile  # about 1 B parameters
    python benchmarks/gpt_parity.py --study recipes --plan             # the runs and predicted seconds; runs nothing
    python benchmarks/gpt_parity.py --size tiny --steps 10 --seeds 0 --text-bytes 1000000      # dry run on CPU

Studies are in parity/studies.py, what they showed is in docs/parity.md, what they are expected to show in
docs/parity-plans.md. `fp8-ds parity` does the same for a model of yours.

Regime 1 trains from scratch at lr 3e-4 (to zero, linearly). At 6e-4 paired runs part between steps 500 and 1,200 and
stay apart (results of 2026-11-20, of moments rounded to nearest). Regime 2 continues a stock run, from bf16 weights, at
a constant 1e-5: an update is then smaller than half a step of a coarse master, so masters without stochastic rounding
must lose there. It starts where the stock run of seed 0 has done a share of its steps (--checkpoint-at), its learning
rate still high, so that there is loss to gain; it reads on in the text where that run was. Regime 3 branches off there,
too, and trains as regime 1 does, warm-up and 3e-4 to zero: 0.39 % parted the first pair of regime 1, because one arm
learned to copy from its context some 20 steps later than the other; branches start behind that jump, so fewer seeds
tell more.

Runs are a work list over all devices, arms in the order in which --arms names them; those that branch off another's
run come after it, and after all whole runs. What is finished is in the results CSV and is not run again: a second call
continues, also on another machine of the same image (--resume-from, when its results folder starts empty). Nor is what
is finished in --cache, whatever --out, the date, --whole and the budget are, if it had these settings, seed, text and
first weights, and this code. A run that
--budget does not suffice for is cut: its state stays in --cache, and the next call goes on with it. Tokens and the
first weights of regimes 2 and 3 live there, too; where a fresh machine has none, the stock run that makes them goes
first. --archive carries the cache from machine to machine as one file.

Prediction for the study "masters", written before the first run on an H200: in regime 1 every FP8 arm within 0.1 % of
stock in the mean, seeds differing more than that; in regime 2 e4m19 and e4m11 within 0.02 % of the fp32 states under
the same FP8 linears, e4m11 rounded to nearest 0.05 to 0.5 % worse than that, bf16 rounded to nearest 0.5 % or more
worse than stock. Of regime 3, written before its first run: every FP8 arm within 0.1 % of stock in the mean, single
pairs within 0.15 %. Those for the others are in docs/parity-plans.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from parity import data, picture, summary
from parity.arms import ARMS, WITHOUT_DEEPSPEED
from parity.models import SIZES
from parity.runs import Results, Scheduler
from parity.studies import STUDIES, describe_plan, work_list
from results_io import dated_stem, heading

from fp8_ds.device import num_gpus
from fp8_ds.parity import archive

HERE = Path(__file__).parent
CACHE = Path(tempfile.gettempdir(), "fp8_ds_gpt_parity")
MAX_EPOCHS = 2


def check_epochs(args: argparse.Namespace, windows: int) -> str:
    """A sentence on how often the text is read.

    Raises:
        SystemExit: more than twice in one run.
    """
    own = args.steps * SIZES[args.size].batch / windows
    if own > MAX_EPOCHS:
        raise SystemExit(
            f"steps: expected at most {MAX_EPOCHS} epochs, got {own:.2f}. Use fewer --steps, or more text."
        )
    both = own * (1 + args.checkpoint_at)
    return f"A run reads the text {own:.2f} times; regimes 2 and 3 with what came before {both:.2f} times."


def parse_args() -> argparse.Namespace:
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--study", choices=list(STUDIES), default="masters", help="what the defaults below are of")
    study = STUDIES[first.parse_known_args()[0].study]
    parser = argparse.ArgumentParser(parents=[first])
    parser.add_argument("--size", choices=list(SIZES), default=study.size)
    parser.add_argument("--steps", type=int, default=study.steps, help="of 32 x 1024 tokens; 3072 are 100.7 M")
    parser.add_argument("--lr", type=float, nargs=2, default=[3e-4, 1e-5], help="of regimes 1 and 3, the peak; of 2")
    parser.add_argument("--seeds", type=int, nargs="+", default=list(study.seeds))
    parser.add_argument("--seeds2", type=int, nargs="+", help="of regime 2; default: --seeds")
    parser.add_argument("--regimes", type=int, nargs="+", default=list(study.regimes), choices=[1, 2, 3])
    parser.add_argument("--by-regime", action="store_true", help="all seeds of a regime before the next; else by seed")
    parser.add_argument(
        "--arms", nargs="+", choices=list(ARMS), metavar="ARM", help="run in this order; default: the study's, in its"
    )
    parser.add_argument("--stage", type=int, choices=[1, 2], default=1)
    parser.add_argument("--vocabulary", choices=["auto", "bpe", "bytes"], default="auto")
    parser.add_argument("--text-bytes", type=int, help="use about this much text: dry runs")
    parser.add_argument("--checkpoint-at", type=float, default=study.checkpoint_at, help="where 2 and 3 branch off")
    parser.add_argument("--compile", action="store_true", help="torch.compile whole models, not only the loss")
    parser.add_argument("--micro-batches", type=int, default=1, help="that a step's 32 sequences are cut into")
    parser.add_argument("--gpus", type=int, help="default: all that are visible; one on CPU")
    parser.add_argument(
        "--gpus-per-run", type=int, default=1, help="data parallel: each takes a part of a step's batch"
    )
    parser.add_argument("--per-gpu", type=int, default=1)
    parser.add_argument("--stagger", type=float, default=0.0, help="seconds between two starts")
    parser.add_argument("--budget", type=float, default=560, help="seconds, preparing the text included")
    parser.add_argument("--saving", type=float, default=45, help="seconds of these kept for the state of a cut run")
    parser.add_argument("--whole", action="store_true", help="start no run that would be cut")
    parser.add_argument("--only-first-weights", action="store_true", help="stop where regimes 2 and 3 can begin")
    parser.add_argument("--estimate", type=float, default=240, help="seconds a run takes, until one has been seen")
    parser.add_argument("--cache", type=Path, help=f"of text, first weights and cut runs; default: {CACHE}")
    parser.add_argument("--own-cache", action="store_true", help="one for this study, all but the text, beside others")
    parser.add_argument("--archive", type=Path, help="the cache as one file: read where it is new, written at the end")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--resume-from", type=Path, nargs="+", help="CSVs of earlier calls, the .json beside each")
    parser.add_argument("--only-report", action="store_true", help="tables and plots of what --resume-from has")
    parser.add_argument("--plan", action="store_true", help="print the runs and predicted seconds")
    args = parser.parse_args()
    args.as_named, args.arms = args.arms is not None, args.arms or list(study.arms)
    batch = SIZES[args.size].batch
    if args.micro_batches < 1 or batch % args.micro_batches:
        parser.error(f"--micro-batches: expected a divisor of {batch}, got {args.micro_batches}. Cut it evenly.")
    if args.micro_batches > 1 and (alone := sorted({*WITHOUT_DEEPSPEED} & {*args.arms})):
        parser.error(f"--micro-batches: expected 1 with {', '.join(alone)}, which accumulate nothing. Leave them out.")
    if args.gpus_per_run != 1:
        _check_group(parser, args, batch)
    args.text_cache = args.cache = args.cache or CACHE
    if args.own_cache:
        args.cache = args.cache.with_name(f"{args.cache.name}_{args.study}")
    args.seeds2 = args.seeds2 if args.seeds2 is not None else args.seeds
    return args


def _check_group(parser: argparse.ArgumentParser, args: argparse.Namespace, batch: int) -> None:
    """Of several GPUs a run, whether there are so many and what they share can be cut."""
    gpus = args.gpus if args.gpus is not None else num_gpus() or args.gpus_per_run
    if not 1 <= args.gpus_per_run <= gpus:
        parser.error(f"--gpus-per-run: expected from 1 to the {gpus} GPUs of --gpus, got {args.gpus_per_run}.")
    if batch // args.micro_batches % args.gpus_per_run:
        parser.error(f"--gpus-per-run: expected a divisor of {batch // args.micro_batches}, got {args.gpus_per_run}.")
    if alone := sorted({*WITHOUT_DEEPSPEED} & {*args.arms}):
        parser.error(f"--gpus-per-run: expected 1 with {', '.join(alone)}, which know one rank. Leave them out.")


def result_name(args: argparse.Namespace) -> str:
    """Of result files: the study, unless it is the first one, and the size, unless it is the study's."""
    study = "" if args.study == "masters" else f"-{args.study}"
    return f"gpt-parity{study}{'' if args.size == STUDIES[args.study].size else '-' + args.size}"


def settings_of(args: argparse.Namespace, digest: str, sentence: str) -> dict[str, Any]:
    """What runs must share to be pairs, as the JSON of a result file has it; a new key needs a value for old files."""
    size = SIZES[args.size]
    return {
        "size": args.size,
        "positions": "rotary",
        "steps": args.steps,
        "lr": args.lr,
        "batch": size.batch,
        "seq_len": size.seq_len,
        "stage": args.stage,
        "compile": args.compile,
        "checkpoint_at": args.checkpoint_at,
        "micro_batches": args.micro_batches,
        "gpus_per_run": args.gpus_per_run,
        "digest": digest,
        "text": sentence,
    }


def run_study(args: argparse.Namespace, stem: Path) -> tuple[Results, list[str]]:
    """Results so far, and the names of runs that are left."""
    start, size = time.monotonic(), SIZES[args.size]
    if args.archive is not None and args.archive.exists() and not args.cache.exists():
        archive.unpack(args.archive, args.cache)
    needed = args.steps * size.batch * size.seq_len // MAX_EPOCHS
    text, _ = data.prepare(args.text_cache, args.vocabulary, size.vocab_size, needed, args.text_bytes)
    sentence = f"{text.describe()}. {check_epochs(args, (text.num_train - 1) // size.seq_len)}"
    if args.own_cache:
        data.link(args.text_cache, args.cache)
    print(f"{sentence} (ready after {time.monotonic() - start:.0f} s)", flush=True)
    results = Results(stem, settings_of(args, text.digest, sentence), args.resume_from)
    args.budget -= time.monotonic() - start
    scheduler = Scheduler(args, results)
    scheduler.run()
    if args.archive is not None:
        archive.pack(args.cache, args.archive)
    return results, scheduler.left_out


def main() -> None:
    args = parse_args()
    study = STUDIES[args.study]
    if args.plan:
        jobs = work_list(args.regimes, args.arms, args.seeds, args.seeds2, args.by_regime, args.as_named)
        changed = replace(study, size=args.size, steps=args.steps, checkpoint_at=args.checkpoint_at)
        print(describe_plan(changed, jobs))
        return
    stem = dated_stem(args.out, result_name(args))
    if args.only_report:
        first = args.resume_from[0] if args.resume_from else stem
        settings = json.loads(first.with_suffix(".json").read_text())["settings"]
        results, left_out = Results(stem, settings, args.resume_from), []
    else:
        results, left_out = run_study(args, stem)
    results.write()
    regimes = sorted({*study.regimes, *(int(row["regime"]) for row in results.rows)})
    steps = results.settings["steps"]
    report = summary.report(results.rows, steps, study.bounded, regimes)
    report += "\n" + summary.report_in_bf16(results.rows, results.runs, steps, regimes)
    report += "\n" + summary.report_late(results.rows, regimes)
    report += "\n" + summary.report_training(results.rows, steps, regimes)
    picture.plot(results.rows, steps, stem.with_suffix(".png"), regimes)
    about = f"{results.settings['text']}\n\nRuns: {json.dumps(results.runs)}\n\nLeft out: {left_out}\n\n"
    failures = "".join(f"\nFAILED {name}\n```\n{tail}\n```\n" for name, tail in results.failures.items())
    stem.with_suffix(".md").write_text(heading(stem.name) + about + report + failures)
    print(report + failures + f"\nLeft out: {left_out}")


if __name__ == "__main__":
    main()
