"""python -m tests.patches.sweep"""

from tests.patches.sweep.running import main

main()
