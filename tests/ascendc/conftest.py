"""Makes the modules beside the tests importable: the command-line check uses them as well."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
