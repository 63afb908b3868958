// Cross-entropies of rows of logits, and their gradients, in one pass over a row that stays in the cache. loss.py calls it.

#include "native.h"

// losses (rows,) and their gradient with respect to the logits (rows, line), of which the first `width` of a row count: the
// softmax less 1 at the target. A row with the target `ignored` has the loss 0 and the gradient 0.
template <class E, class F>
static void run(const E* logits, const int64_t* targets, F* losses, E* grad, int64_t rows, int64_t width, int64_t line,
                int64_t ignored, int64_t threads) {
#pragma omp parallel num_threads(threads)
  {
    Memory<F> memory;
    F* row = memory.take(whole<F>(width));
#pragma omp for
    for (int64_t i = 0; i < rows; i++) {
      const int64_t target = targets[i];
      const E* own = logits + i * line;
      E* to = grad + i * line;
      if (target == ignored) {
        losses[i] = 0;
        std::memset(to, 0, line * sizeof(E));
        continue;
      }
      for (int64_t j = 0; j < width; j++) row[j] = widened(own[j]);
      const F wanted = row[target];
      F maximum;
      const F sum = exponentials(row, width, whole<F>(width), maximum);
      losses[i] = std::log(sum) + (maximum - wanted);
      scale(row, width, 1 / sum);
      row[target] -= 1;
      for (int64_t j = 0; j < width; j++) narrow(to[j], row[j]);
      std::memset(to + width, 0, (line - width) * sizeof(E));
    }
  }
}

#define CROSS_ENTROPY(NAME, E, F)                                                                                        \
  extern "C" void cross_entropy_##NAME(const E* logits, const int64_t* targets, F* losses, E* grad, int64_t rows,        \
                                       int64_t width, int64_t line, int64_t ignored, int64_t threads) {                  \
    run<E, F>(logits, targets, losses, grad, rows, width, line, ignored, threads);                                       \
  }
CROSS_ENTROPY(bfloat16, BFloat16, float)
CROSS_ENTROPY(float32, float, float)
CROSS_ENTROPY(float64, double, double)
