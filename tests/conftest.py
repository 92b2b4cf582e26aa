import faulthandler

import torch

faulthandler.enable()
# Tests run several ranks on few cores.
torch.set_num_threads(1)
