import sys
from tests.simulation.model import draw
from tests.simulation.run import simulate
print(simulate(draw(int(sys.argv[1])), print))
