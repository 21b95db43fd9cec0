"""How hatchling builds the README into the distribution, so that it can be read on an index."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

# A link or a picture whose target is a file of the repository.
RELATIVE = re.compile(r"(!?)\[([^\[\]]*)\]\((?![a-z]+:|#)([^()\s]+)\)")


def readme_on_index(text: str, address: str | None) -> str:
    """Return the README with links into the repository at `address`.

    Without an address a link becomes its text, and a picture goes.
    """

    def elsewhere(found: re.Match[str]) -> str:
        picture, shown, target = found.groups()
        if address is None:
            return "" if picture else shown
        return f"{picture}[{shown}]({address}/{'raw' if picture else 'blob'}/HEAD/{target})"

    return RELATIVE.sub(elsewhere, text)


class Readme(MetadataHookInterface):
    """Sets the field `readme`."""

    def update(self, metadata: dict[str, object]) -> None:
        """Set it: hatchling calls this."""
        urls = metadata.get("urls")
        address = urls.get("Source") if isinstance(urls, dict) else None
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        kind = "text/markdown"
        metadata["readme"] = {"content-type": kind, "text": readme_on_index(text, address)}
