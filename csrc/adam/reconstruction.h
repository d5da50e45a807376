// Reconstructs gradients and parameters of an AdamW update from its states.
// Only included by kernels.cpp, inside the namespace of the instruction set.

// [Note: lost gradients]
// The gradient is computed from the first moments before and after an update, with an error of about 2^-20 of the
// moment. This is enough for the 8 or 11 significant bits of a gradient that is not a thousand times smaller. A
// gradient of 0 is recognised exactly, because no other gradient leaves the same moment, except gradients too small to
// change it. The old parameters are computed from the new ones, by subtraction of the change, which follows from the
// new moments. The error is a few units in the last place; because the old low bits are known, the high bits follow.
// Both results can be wrong for a few elements ("lost"): the update finds and reports them.
//
// To try the reconstruction of each element takes nearly half the time of the update itself. So the update only
// collects bounds over groups of elements ([Note: doubt]), which prove that all elements of a group can be
// reconstructed. It tries only the elements of the other groups.
struct Reconstruction {
    explicit Reconstruction(const Scalars& s)
        : s(s), from_avg(s.m_weight < 0.5f), m_weight(from_avg ? s.m_weight : s.m_weight - 1.0f),
          inverse_weight(1.0f / s.m_weight), inverse_scale(1.0f / s.grad_scale), inverse_factor(1.0f / s.param_factor) {
    }

    float moment(float before, float g) const {
        return (from_avg ? before : g) + m_weight * (g - before); // torch's lerp starts from the nearer end
    }

    float moved(float first, float second) const { return s.step_size * first / (sqrtf(second) * s.inv_bias2 + s.eps); }

    float grad(float before, float after) const {
        const float g = (before + (after - before) * inverse_weight) * inverse_scale;
        return after == moment(before, 0.0f) ? 0.0f : g;
    }

    // The bits of the master before an update, with an error of a few units.
    uint32_t about_master(float after, float first, float second) const {
        return bits_of((after - moved(first, second)) * inverse_factor);
    }

    const Scalars s;
    const bool from_avg;
    const float m_weight, inverse_weight, inverse_scale, inverse_factor;
};

// Half the distance of two 16-bit gradients, in units of the last place of fp32: nearer values are rounded to the same.
constexpr uint32_t half_step(Dtype dtype) {
    return dtype == Dtype::bf16 ? 0x8000u : 0x1000u;
}

// Whether `found` may not be rounded to `given`. The bits of floats, as integers, are in the order of their values, and
// those of neighbours differ by one.
inline bool is_lost(float found, float given, uint32_t half_step) {
    const bool near = bits_of(found) - bits_of(given) + (half_step - 1) < 2 * half_step - 1;
    return !near | is_nan(bits_of(given)); // rounding does not preserve the bits of a NaN
}

inline bool is_lost_master(uint32_t about, uint32_t given) {
    const bool near = given - about + 0x8000u < 0x10000u;
    return !near | is_nan(given); // the low bits of a NaN are arbitrary
}

// --- bounds that prove a reconstruction -----------------------------------------------------------------------------

// [Note: doubt]
// Let u = 2^-24, g the scaled gradient, b the moment before the update, and w the gradient's weight. Rounding errors
// change the reconstructed g by less than u (10 |g| + (6 + 1/w) |b|): six errors are in g - b and the values computed
// from it, one is that of the new moment, divided by w, and the others are in g alone. Half the distance to the next
// 16-bit value is 2^-9 |g| for bf16 and 2^-12 |g| for fp16. So g is reconstructed exactly if
//
//     |b| 1.25 (6 + 1/w) 2^-15 < |g|     (2^-12 for fp16)
//
// which leaves a margin for terms of second order. The update compares the squares: they have no signs, and v_weight
// g^2 is computed anyway. A master p is reconstructed if the update has changed it by less than 2^14 |p|; the limit
// here is 2^12. Both proofs need numbers that are neither near overflow nor denormal, and a weight, scale and factor of
// the usual size. All other elements are in doubt.

// Bits of floats without their signs, which are in the order of their values as integers.
constexpr uint32_t kTiny = 27u << 23;   // 2^-100
constexpr uint32_t kLarge = 227u << 23; // 2^100
constexpr uint32_t kWay = 12u << 23;    // the largest allowed difference of two exponents

inline uint32_t magnitude(float x) {
    return bits_of(x) & 0x7fffffffu;
}

// The extremes over a group of elements of an update.
struct Extremes {
    // margin: the gradient's square minus the bound of the rounding errors; negative or NaN if the element is in doubt.
    void add(float margin, float param, float moved) {
        const uint32_t above = bits_of(margin) - kTiny; // far above kLarge for smaller and for negative margins
        furthest_margin = furthest_margin > above ? furthest_margin : above;
        const uint32_t size = magnitude(param), way = magnitude(moved);
        least_param = least_param < size ? least_param : size;
        most_param = most_param > size ? most_param : size;
        most_moved = most_moved > way ? most_moved : way;
    }

    bool doubts_grads() const { return furthest_margin > kLarge - kTiny; }

    bool doubts_params() const { return least_param < kTiny || most_param > kLarge || most_moved > least_param + kWay; }

    uint32_t furthest_margin = 0, least_param = ~0u, most_param = 0, most_moved = 0;
};

// The results of a group of at most kStep elements.
struct Doubt {
    Doubt(const Scalars& s, Dtype dtype)
        : usual(s.m_weight >= 0x1p-10f && s.m_weight <= 1.0f && s.grad_scale >= 0x1p-40f && s.grad_scale <= 0x1p40f &&
                s.v_weight >= 0x1p-40f && s.v_weight <= 1.0f && s.param_factor >= 0.5f && s.param_factor <= 1.0f) {
        const float least = 1.25f * (6.0f + 1.0f / s.m_weight) * (dtype == Dtype::bf16 ? 0x1p-15f : 0x1p-12f);
        share = least * least * s.v_weight;
    }

    void note(const Extremes& extremes) {
        grads = !usual || extremes.doubts_grads();
        params = !usual || extremes.doubts_params();
    }

    const bool usual;
    float share;                      // times the moment's square: the limit of v_weight g^2, see [Note: doubt]
    bool grads = true, params = true; // whether some may be lost
    alignas(64) float before[kStep];  // the first moment
};
