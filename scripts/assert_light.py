"""Exit with an error if a heavy package can be imported here: the light environment must hold none."""

import sys
from importlib.util import find_spec

HEAVY = ("torch", "vllm", "transformers", "numpy")

found = [name for name in HEAVY if find_spec(name) is not None]
if found:
    sys.exit(f"the light environment holds {', '.join(found)}: remove .venv-core and run make again")
print(f"light environment: none of {', '.join(HEAVY)}")
