// What a step and a prompt of the gated delta rule have in common.
#pragma once

constexpr float UNIT_EPS = 1e-6f;  // under the root of a key's and a query's length

// Beyond 20 it is x to the last bit.
__device__ __forceinline__ float softplus(float x) {
  return x > 20.0f ? x : log1pf(expf(fminf(x, 20.0f)));
}
