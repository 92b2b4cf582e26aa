"""NVFP4 weights: 4-bit E2M1 codes, an E4M3 scale per 16 consecutive k, an FP32 global scale.

The format is described by nvidia-modelopt and compressed-tensors; both their conventions load here.
"""

from tpoverlap.quant.nvfp4.conventions import check_fits, from_compressed_tensors, from_modelopt
from tpoverlap.quant.nvfp4.dispatch import dequantize
from tpoverlap.quant.nvfp4.encode import quantize
from tpoverlap.quant.nvfp4.format import NVFP4Tensor, concat_columns, concat_rows
from tpoverlap.quant.nvfp4.qpn2 import QPN2Tensor, from_qpn2, to_qpn2

__all__ = [
    "NVFP4Tensor",
    "QPN2Tensor",
    "check_fits",
    "concat_columns",
    "concat_rows",
    "dequantize",
    "from_compressed_tensors",
    "from_modelopt",
    "from_qpn2",
    "quantize",
    "to_qpn2",
]
