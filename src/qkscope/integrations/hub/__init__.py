"""Push runs and results to the Hub and pull them back; the options of a push."""

from __future__ import annotations

from dataclasses import dataclass

from qkscope.options import option


@dataclass(frozen=True)
class PushOptions:
    """Options for pushing a run or results."""

    revision: str = option("main", "Branch of the repository; it is created if necessary.")
    public: bool = option(False, "Create the repository for everybody to see; by default it is private.")
    overwrite: bool = option(False, "Replace what the branch holds, also if it is something else.")
    with_names: bool = option(False, "Send file names of documents, without their folders; by default digests.")
    with_tokens: bool = option(
        False, "Send the text of tokens that is stored beside vectors, and a passage of your own."
    )
    license: str = option("unknown", "Licence of these numbers as the Hub spells it, such as cc-by-4.0.")
