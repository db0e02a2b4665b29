from .exhaustive import Exhaustive
from .elimination import Elimination
from .problem import *
PLANNERS={"elimination":Elimination,"exhaustive":Exhaustive}
