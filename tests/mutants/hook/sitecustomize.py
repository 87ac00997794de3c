"""Python imports this by itself where this folder is on its path: one file is then read from another place."""

import os
from importlib.machinery import SourceFileLoader

if "MUTANT_FILE" in os.environ:
    _unmutated = SourceFileLoader.get_code

    def _get_code(self: SourceFileLoader, name: str) -> object:
        if os.path.realpath(self.path) != os.environ["MUTANT_FILE"]:
            return _unmutated(self, name)
        with open(os.environ["MUTANT_TEXT"]) as text:
            return compile(text.read(), self.path, "exec", dont_inherit=True)

    SourceFileLoader.get_code = _get_code
