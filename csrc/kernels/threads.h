// A few helping threads for large kernel calls.
#pragma once

#include <cstdint>

// Calls work(context, i) for every i below n, on at most `threads` threads, the caller's included; returns when all are
// done. Where another call has the helpers already, the caller does everything itself.
void cgx_parallel(int threads, int64_t n, void (*work)(void* context, int64_t i), void* context);
