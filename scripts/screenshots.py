# SPDX-License-Identifier: Apache-2.0
"""Takes pictures of the documentation site in a browser, for docs/pictures/site.

    make docs && python scripts/screenshots.py

Needs Chromium and pillow. The pictures show the site at the width of a desktop
and of a phone. No page of the site shows them.
"""

import argparse
import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

_ROOT = Path(__file__).resolve().parent.parent
_PAGES = {
    "landing": "index",
    "reference": "api/norms",
    "gallery": "gallery",
    "benchmarks": "benchmarks/index",
}
_SIZES = {"desktop": (1280, 900), "phone": (390, 844)}
# Text and plots need no more, and the files stay small.
_COLOURS = 64


def _browser() -> str:
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (found := shutil.which(name)) is not None:
            return found
    raise SystemExit("screenshots.py: no Chromium here; install the package chromium.")


def _take(page: Path, size: tuple[int, int], file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "page.png"
        width, height = size
        subprocess.run(
            [
                _browser(), "--headless=new", "--no-sandbox", "--disable-gpu",
                "--hide-scrollbars", f"--window-size={width},{height}",
                f"--screenshot={raw}", page.as_uri(),
            ],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        picture = Image.open(raw).convert("RGB").quantize(_COLOURS)
        picture.save(file, optimize=True)


def main() -> None:
    """Take each page in each size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", type=Path, default=_ROOT / "build/docs/html")
    parser.add_argument("--out", type=Path, default=_ROOT / "docs/pictures/site")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, page in _PAGES.items():
        path = (arguments.site / f"{page}.html").resolve()
        if not path.exists():
            raise SystemExit(f"screenshots.py: {path} is not there; run `make docs`.")
        for device, size in _SIZES.items():
            _take(path, size, arguments.out / f"{name}_{device}.png")


if __name__ == "__main__":
    main()
