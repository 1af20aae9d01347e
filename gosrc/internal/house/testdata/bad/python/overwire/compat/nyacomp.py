from .. import _core
from .tensorizer import x
import overwire.compat.tensorizer
print("hello")
from overwire import load_file  # a translation, fine
