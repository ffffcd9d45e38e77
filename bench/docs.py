"""Makes every output and picture of the exercises anew, on this machine, and puts them into their pages.

    python bench/docs.py [docs/stall.md ...] [--keep FOLDER]

Without pages: all of them. In a page, what stands between

    <!-- example: COMMAND -->  and  <!-- end -->      is COMMAND and what it printed on stdout;
    <!-- picture: FILE.html | HEADING | NAME.svg -->  takes that figure of a report page into docs/images/NAME.svg.

A command that needs a server of its own names it: `example[serve OPTIONS]` runs `biphase serve OPTIONS` on port 8123
for it. Commands run one after the other in one folder, with the .venv of the repository first in PATH; the machine
should do nothing else meanwhile.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = ("reproduce.md", "crossovers.md", "stall.md", "split.md", "decode-floor.md", "kernels.md")
PORT = 8123
EXAMPLE = re.compile(
    r"(<!-- example(?:\[(?P<server>[^\]]*)\])?: (?P<command>[^\n]*?) -->\n).*?(<!-- end -->)", re.DOTALL
)
PICTURE = re.compile(r"<!-- picture: (?P<page>[^|]*) \| (?P<heading>[^|]*) \| (?P<name>[^|]*?) -->")
VIEW_BOX = re.compile(r'<svg viewBox="0 0 (\d+) (\d+)"')
WIDE = {"COLUMNS": "110", "BIPHASE_API_KEY": "", "OPENAI_API_KEY": ""}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=Path)
    parser.add_argument("--keep", type=Path, help="Folder for what the commands write; else a temporary one.")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = asked.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for page in asked.pages or [DOCS / name for name in PAGES]:
            remake(page, folder)


def remake(page: Path, folder: Path) -> None:
    """Run the page's commands in ``folder`` and write the page, then its pictures."""
    text = EXAMPLE.sub(lambda match: example(match, folder), page.read_text(encoding="utf-8"))
    page.write_text(text, encoding="utf-8")
    for match in PICTURE.finditer(text):
        picture(folder / match["page"], match["heading"], DOCS / "images" / match["name"])


def example(match: re.Match[str], folder: Path) -> str:
    """The marked block with its command run."""
    print(match["command"], file=sys.stderr)
    with served(match["server"]):
        output = run(match["command"], folder)
    return f"{match[1]}```\n$ {match['command']}\n{output}\n```\n{match[4]}"


def run(command: str, folder: Path) -> str:
    """What a command printed on stdout; progress goes to this script's stderr. Ends everything when it fails."""
    path = f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    there = {**os.environ, **WIDE, "PATH": path, "XDG_CONFIG_HOME": str(folder.resolve())}  # of biphase calibrate
    ended = subprocess.run(command, shell=True, check=False, cwd=folder, stdout=subprocess.PIPE, text=True, env=there)
    if ended.returncode != 0:
        raise SystemExit(f"{command}: status {ended.returncode}")
    return "\n".join(line.rstrip() for line in ended.stdout.strip("\n").splitlines())


@contextmanager
def served(options: str | None) -> Iterator[None]:
    """``biphase serve`` with these options on port 8123, where an example asks for it."""
    if options is None:
        yield
        return
    command = [str(ROOT / ".venv" / "bin" / "biphase"), *options.split(), "--port", str(PORT)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until_ready(process)
            yield
        finally:
            process.terminate()


def wait_until_ready(process: "subprocess.Popen[bytes]") -> None:
    while process.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/ready", timeout=2).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise SystemExit(f"the server ended with status {process.returncode}")


def picture(page: Path, heading: str, target: Path) -> None:
    """Cut one figure out of a report page; its colours come along, for light and dark."""
    html = page.read_text(encoding="utf-8")
    match = re.search(rf"<h2>{re.escape(heading)}</h2>(?:<div[^>]*>)?(<svg.*?</svg>)", html, re.DOTALL)
    if match is None:
        raise SystemExit(f"{page.name} has no figure {heading!r}")
    size = VIEW_BOX.match(match[1])
    assert size is not None
    width, height = size.groups()
    rules = files("biphase.report").joinpath("page.css").read_text(encoding="utf-8").splitlines()
    style = " ".join(rule.strip() for rule in rules if not rule.startswith("svg {"))
    size_and_font = f'width="{width}" height="{height}" font-family="system-ui, sans-serif"'
    start = f'<svg xmlns="http://www.w3.org/2000/svg" {size_and_font}'
    paper = f'<style>{style}</style><rect width="{width}" height="{height}" style="fill:var(--paper)"/>'
    body = match[1].replace("<svg", start, 1).replace("</title>", f"</title>{paper}", 1)
    target.parent.mkdir(exist_ok=True)
    target.write_text(body + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
