// Causal softmax attention and the difference of two maps, forward and backward, on a CPU. cpu.py compiles and calls it.
//
// One job is one key/value head of one sequence. Its queries are taken HEIGHT rows at a time. The maps of these rows are held
// whole, so that no softmax has to be corrected and a difference of maps multiplies the values once. Keys that the causal
// mask hides from all rows of a block are skipped. Everything is computed in F: float, or double for inputs in double.
//
// Letters, as in cpu.py: B sequences, M maps (2: their difference), C maps with keys of their own, K key/value heads, G query
// heads of each, T positions with n keys each, widths d and dv. A row of `width` numbers lies in a line of whole vectors: the
// numbers behind its end are zero (key_line, value_line, map_line: lengths of such lines).

#include "../../native.h"

constexpr int TILE = 6;                        // rows of a tile
constexpr int COLUMNS = BYTES == 32 ? 2 : 4;  // vectors side by side in a tile of a product; they fit the registers
constexpr int HEIGHT = 24;                      // query rows of a block
constexpr int AHEAD = 8;                        // rows that are fetched ahead: the rows of one head lie far apart

// ---------------------------------------- products of matrices

// A matrix whose entry (i, j) is data[i * row + j * column].
template <class F> struct Matrix {
  const F* data;
  int64_t row, column;
};

// to (R, N vectors) = left (R, inner) right (inner, N vectors), plus what is there if `add`.
template <int R, int N, class F>
static inline void tile(int64_t inner, Matrix<F> left, const F* right, int64_t right_row, F* to, int64_t to_row, bool add) {
  constexpr int W = WIDTH<F>;
  Vec<F> sums[R][N];
  for (int i = 0; i < R; i++)
    for (int j = 0; j < N; j++) sums[i][j] = add ? load(to + i * to_row + j * W) : Vec<F>{};
  for (int64_t k = 0; k < inner; k++) {
    Vec<F> row[N];
    for (int j = 0; j < N; j++) row[j] = load(right + k * right_row + j * W);
    for (int i = 0; i < R; i++) {
      F factor = left.data[i * left.row + k * left.column];
      for (int j = 0; j < N; j++) sums[i][j] += factor * row[j];
    }
  }
  for (int i = 0; i < R; i++)
    for (int j = 0; j < N; j++) store(to + i * to_row + j * W, sums[i][j]);
}

template <int R, int N, class F>
static void rest(int64_t rows, int64_t inner, Matrix<F> left, const F* right, int64_t right_row, F* to, int64_t to_row,
                 bool add) {
  if constexpr (R > 0) {
    if (rows == R) return tile<R, N>(inner, left, right, right_row, to, to_row, add);
    rest<R - 1, N>(rows, inner, left, right, right_row, to, to_row, add);
  }
}

template <int N, class F>
static void strip(int64_t rows, int64_t inner, Matrix<F> left, const F* right, int64_t right_row, F* to, int64_t to_row,
                  bool add) {
  for (; rows >= TILE; rows -= TILE, left.data += TILE * left.row, to += TILE * to_row)
    tile<TILE, N>(inner, left, right, right_row, to, to_row, add);
  rest<TILE - 1, N>(rows, inner, left, right, right_row, to, to_row, add);
}

// to (rows, columns) = left (rows, inner) right (inner, columns), plus what is there if `add`; columns: whole vectors.
template <class F>
static void product(int64_t rows, int64_t columns, int64_t inner, Matrix<F> left, const F* right, int64_t right_row, F* to,
                    int64_t to_row, bool add = false) {
  constexpr int W = WIDTH<F>;
  int64_t j = 0;
  for (; j + COLUMNS * W <= columns; j += COLUMNS * W)
    strip<COLUMNS>(rows, inner, left, right + j, right_row, to + j, to_row, add);
  for (; j + 2 * W <= columns; j += 2 * W) strip<2>(rows, inner, left, right + j, right_row, to + j, to_row, add);
  if (j < columns) strip<1>(rows, inner, left, right + j, right_row, to + j, to_row, add);
}

// ---------------------------------------- tensors

// A tensor and the strides of all its dimensions but the last, whose numbers lie side by side.
struct View {
  void* data;
  int64_t strides[5];
  template <class E> E* at(int64_t a, int64_t b = 0, int64_t c = 0, int64_t d = 0, int64_t e = 0) const {
    return static_cast<E*>(data) + a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3] + e * strides[4];
  }
};

// q (B, M, K, G, T, d), k (B, C, K, T, n, d), v (B, K, T, n, dv), lam (B, K, G, T, 1) in F, out (B, K, G, T, dv); gradients.
// cpu.py has the same fields in the same order.
struct Call {
  int64_t B, M, C, K, G, T, n, d, dv, threads;
  View q, k, v, lam, out, grad_out, grad_q, grad_k, grad_v, grad_lam;
};

// ---------------------------------------- attention of one key/value head

template <class E, class F> struct Head {
  const Call& c;
  const int64_t b, h;
  Memory<F>& memory;
  const int64_t S = c.T * c.n, map_line = whole<F>(S), key_line = whole<F>(c.d), value_line = whole<F>(c.dv);
  const F factor = 1 / std::sqrt(F(c.d));

  // `rows` rows of `width` numbers, `stride` apart, into lines of whole vectors, `line` apart.
  void read(const E* from, int64_t stride, int64_t rows, int64_t width, F* to, int64_t line, F times = 1) const {
    for (int64_t i = 0; i < rows; i++, from += stride, to += line) {
      for (int64_t j = 0; j < width; j += 64 / sizeof(E)) __builtin_prefetch(from + AHEAD * stride + j);
      for (int64_t j = 0; j < width; j++) to[j] = widened(from[j]) * times;
      std::fill(to + width, to + whole<F>(width), F(0));
    }
  }
  void write(E* to, int64_t stride, int64_t rows, int64_t width, const F* from, int64_t line) const {
    for (int64_t i = 0; i < rows; i++, from += line, to += stride) {
      for (int64_t j = 0; j < width; j += 64 / sizeof(E)) __builtin_prefetch(to + AHEAD * stride + j, 1);
      for (int64_t j = 0; j < width; j++) narrow(to[j], from[j]);
    }
  }

  // S keys or values of a head, whose n sets lie `set` apart: (map_line, whole<F>(width)); the lines behind them are zero.
  F* rows(const E* from, int64_t row, int64_t set, int64_t width) const {
    const int64_t line = whole<F>(width);
    F* to = memory.take(map_line * line);
    for (int64_t i = 0; i < c.n; i++) read(from + i * set, row, c.T, width, to + i * line, c.n * line);
    std::fill(to + S * line, to + map_line * line, F(0));
    return to;
  }
  F* keys(int64_t m) const { return rows(c.k.at<E>(b, m, h), c.k.strides[3], c.k.strides[4], c.d); }
  F* values() const { return rows(c.v.at<E>(b, h), c.v.strides[2], c.v.strides[3], c.dv); }
  F* turned(const F* from, int64_t width) const {  // map_line lines of `width` numbers -> (width, map_line)
    F* to = memory.take(width * map_line);
    const int64_t line = whole<F>(width);
    for (int64_t i = 0; i < map_line; i += WIDTH<F>)
      for (int64_t j = 0; j < width; j++) {
        Vec<F> column;
        for (int64_t lane = 0; lane < WIDTH<F>; lane++) column[lane] = from[(i + lane) * line + j];
        store(to + j * map_line + i, column);
      }
    return to;
  }
  F* zeros(int64_t size) const {
    F* to = memory.take(size);
    std::fill(to, to + size, F(0));
    return to;
  }

  // Numerators of map m in the rows of a block, and in `sums` their denominators. q (R, key_line) receives the scaled queries.
  void maps(int64_t m, int64_t g, int64_t start, int64_t R, const F* turned_keys, F* q, F* to, F* sums) const {
    const int64_t width = whole<F>((start + R) * c.n);
    read(c.q.at<E>(b, m, h, g, start), c.q.strides[4], R, c.d, q, key_line, factor);
    product<F>(R, width, c.d, {q, key_line, 1}, turned_keys, map_line, to, map_line);
    F maximum;
    for (int64_t i = 0; i < R; i++) sums[i] = exponentials(to + i * map_line, (start + i + 1) * c.n, width, maximum);
  }
  F lam(int64_t g, int64_t t) const { return *c.lam.at<F>(b, h, g, t); }

  void forward() const {
    F *turned_keys[2], *map[2], sums[2][HEIGHT];
    for (int64_t m = 0; m < c.C; m++) turned_keys[m] = turned(keys(m), c.d);
    for (int64_t m = 0; m < c.M; m++) map[m] = memory.take(HEIGHT * map_line);
    F *v = values(), *q = memory.take(HEIGHT * key_line), *out = memory.take(HEIGHT * value_line);
    for (int64_t g = 0; g < c.G; g++)
      for (int64_t start = 0; start < c.T; start += HEIGHT) {
        const int64_t R = std::min<int64_t>(HEIGHT, c.T - start), seen = (start + R) * c.n;
        for (int64_t m = 0; m < c.M; m++) maps(m, g, start, R, turned_keys[m % c.C], q, map[m], sums[m]);
        if (c.M == 2)
          for (int64_t i = 0; i < R; i++) {
            F *one = map[0] + i * map_line, *two = map[1] + i * map_line;
            const F over = lam(g, start + i) * sums[0][i] / sums[1][i];
            for (int64_t j = 0; j < whole<F>(seen); j += WIDTH<F>) store(one + j, load(one + j) - over * load(two + j));
          }
        product<F>(R, value_line, seen, {map[0], map_line, 1}, v, value_line, out, value_line);
        for (int64_t i = 0; i < R; i++) scale(out + i * value_line, value_line, 1 / sums[0][i]);
        write(c.out.at<E>(b, h, g, start), c.out.strides[3], R, c.dv, out, value_line);
      }
  }

  // P is a map and W the matrix that multiplies the values. dW = dO V', dV = W' dO, dS = P (dW - rowsum(P dW)), dQ = dS K and
  // dK = dS' Q; dS of the second map is multiplied by -lam, and dlam = -rowsum(P2 dW).
  void backward() const {
    F *k[2], *turned_keys[2], *dk[2], *q[2], *map[2], sums[HEIGHT];
    for (int64_t m = 0; m < c.C; m++) k[m] = keys(m), turned_keys[m] = turned(k[m], c.d), dk[m] = zeros(S * key_line);
    for (int64_t m = 0; m < c.M; m++) q[m] = memory.take(HEIGHT * key_line), map[m] = memory.take(HEIGHT * map_line);
    F *turned_values = turned(values(), c.dv), *dv_sum = zeros(S * value_line);
    F* w = c.M == 2 ? memory.take(HEIGHT * map_line) : map[0];
    F *dw = memory.take(HEIGHT * map_line), *grad = memory.take(HEIGHT * value_line), *dq = memory.take(HEIGHT * key_line);
    for (int64_t g = 0; g < c.G; g++)
      for (int64_t start = 0; start < c.T; start += HEIGHT) {
        const int64_t R = std::min<int64_t>(HEIGHT, c.T - start), seen = (start + R) * c.n, width = whole<F>(seen);
        read(c.grad_out.at<E>(b, h, g, start), c.grad_out.strides[3], R, c.dv, grad, value_line);
        product<F>(R, width, c.dv, {grad, value_line, 1}, turned_values, map_line, dw, map_line);
        for (int64_t m = 0; m < c.M; m++) {
          maps(m, g, start, R, turned_keys[m % c.C], q[m], map[m], sums);
          for (int64_t i = 0; i < R; i++) scale(map[m] + i * map_line, width, 1 / sums[i]);
        }
        if (c.M == 2)
          for (int64_t i = 0; i < R; i++)
            for (int64_t at = i * map_line; at < i * map_line + width; at += WIDTH<F>)
              store(w + at, load(map[0] + at) - lam(g, start + i) * load(map[1] + at));
        product<F>(seen, value_line, R, {w, 1, map_line}, grad, value_line, dv_sum, value_line, true);
        for (int64_t m = 0; m < c.M; m++) {
          for (int64_t i = 0; i < R; i++) scores(m, g, start + i, map[m] + i * map_line, dw + i * map_line, width);
          product<F>(R, key_line, seen, {map[m], map_line, 1}, k[m % c.C], key_line, dq, key_line);
          scale(dq, R * key_line, factor);
          write(c.grad_q.at<E>(b, m, h, g, start), c.grad_q.strides[4], R, c.d, dq, key_line);
          product<F>(seen, key_line, R, {map[m], 1, map_line}, q[m], key_line, dk[m % c.C], key_line, true);
        }
      }
    for (int64_t i = 0; i < c.n; i++) {
      for (int64_t m = 0; m < c.C; m++)
        write(c.grad_k.at<E>(b, m, h, 0, i), c.grad_k.strides[3], c.T, c.d, dk[m] + i * key_line, c.n * key_line);
      write(c.grad_v.at<E>(b, h, 0, i), c.grad_v.strides[2], c.T, c.dv, dv_sum + i * value_line, c.n * value_line);
    }
  }

  // A row of map m becomes the gradient of its scores.
  void scores(int64_t m, int64_t g, int64_t t, F* p, const F* dw, int64_t width) const {
    Vec<F> sums{};
    for (int64_t j = 0; j < width; j += WIDTH<F>) sums += load(p + j) * load(dw + j);
    const F mean = total<F>(sums), times = m ? -lam(g, t) : 1;
    if (m) *c.grad_lam.at<F>(b, h, g, t) = -mean;
    for (int64_t j = 0; j < width; j += WIDTH<F>) store(p + j, load(p + j) * (load(dw + j) - mean) * times);
  }
};

template <class E, class F> static void run(const Call& c, bool backward) {
#pragma omp parallel num_threads(c.threads)
  {
    Memory<F> memory;
#pragma omp for schedule(dynamic)
    for (int64_t job = 0; job < c.B * c.K; job++) {
      memory.used = 0;
      Head<E, F> head{c, job / c.K, job % c.K, memory};
      backward ? head.backward() : head.forward();
    }
  }
}

extern "C" {
void attend_bfloat16(const Call* c, int backward) { run<BFloat16, float>(*c, backward); }
void attend_float32(const Call* c, int backward) { run<float, float>(*c, backward); }
void attend_float64(const Call* c, int backward) { run<double, double>(*c, backward); }
}
