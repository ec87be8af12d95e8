"""Does every file compile? python3 syntax.py FILE ...; C3 without writing anything."""

from __future__ import annotations

import sys
from pathlib import Path

for name in sys.argv[1:]:
    compile(Path(name).read_bytes(), name, "exec", dont_inherit=True)
