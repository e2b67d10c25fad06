"""Run the campaign: python -m tests.lab.faults [--trials N] [--seed N] [--only TEXT] [--jobs N]

Trials that are done are kept in the work folder, so a campaign that was stopped goes on with the same command.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests import ROOT
from tests.lab.faults.campaign import Campaign, chosen
from tests.lab.faults.table import write_results


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.faults", description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=100, help="trials of each row (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all random choices (default: 0)")
    parser.add_argument("--only", default="", metavar="TEXT", help="only rows whose name contains this text")
    parser.add_argument("--jobs", type=int, default=2, help="trials at the same time (default: 2)")
    work = Path(tempfile.gettempdir()) / "hebbian-faults"
    parser.add_argument("--work", type=Path, default=work, metavar="DIR", help=f"work folder (default: {work})")
    output = ROOT / "results" / "reliability"
    parser.add_argument("--output", type=Path, metavar="DIR", help=f"write the table here, such as {output}")
    arguments = parser.parse_args()
    rows = chosen(arguments.only)
    if not rows:
        parser.error(f"no row has {arguments.only!r} in its name")
    campaign = Campaign(arguments.work, arguments.seed, arguments.trials, arguments.jobs)
    found = campaign.run(rows)
    if arguments.output is not None:
        write_results(arguments.output, found, campaign)
    return 1 if any(not trial.verdict.allowed for trial in found) else 0


if __name__ == "__main__":
    sys.exit(main())
