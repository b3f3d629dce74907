// The table of an instruction set's functions, under the name TW_TABLE.

namespace tw {

const Kernels* TW_TABLE() {
    static const Kernels table = {kIsa, 2 * kPairWords, kByteWords, kSignedRows, quantise, quantise_signed, to_bf16, round_bf16, norm, product_int8, product_bf16,
                                  product_fp32, swiglu, sigmoid_gate, function, round_blocks, to_blocks, blend, to_fp32, attend,
                                  turn, halves, divide,
                                  softmax, weigh, unit, convolve, delta_rule};
    return &table;
}

}  // namespace tw
