import faulthandler

import pytest
import torch

faulthandler.enable()
# Tests run several ranks on few cores.
torch.set_num_threads(1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("multigpu") and torch.cuda.device_count() < 2:
        pytest.skip(f"needs two CUDA GPUs, and torch sees {torch.cuda.device_count()}")
