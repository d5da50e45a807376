// infinity._adam: buffers come as addresses, sizes and dtype codes; infinity/kernels checks them first.
#include "dispatch.h"
#include "pool.h"
#include "run.h"

#include <cmath>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;
using namespace infinity::adam;

namespace {

template <class T> T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

AdamScalars adam_scalars(double lr, double beta1, double beta2, double eps, double weight_decay, int64_t step,
                         bool decoupled, double grad_scale) {
    const double bias1 = 1.0 - std::pow(beta1, static_cast<double>(step));
    const double bias2 = 1.0 - std::pow(beta2, static_cast<double>(step));
    AdamScalars s;
    s.grad_scale = static_cast<float>(grad_scale);
    s.param_factor = decoupled ? static_cast<float>(1.0 - lr * weight_decay) : 1.0f;
    s.l2 = decoupled ? 0.0f : static_cast<float>(weight_decay);
    s.m_weight = static_cast<float>(1.0 - beta1);
    s.v_factor = static_cast<float>(beta2);
    s.v_weight = static_cast<float>(1.0 - beta2);
    s.neg_step = static_cast<float>(-lr / bias1);
    s.inv_bias2 = static_cast<float>(1.0 / std::sqrt(bias2));
    s.eps = static_cast<float>(eps);
    return s;
}

} // namespace

PYBIND11_MODULE(_adam, m) {
    m.doc() = "Optimizer kernels of infinity; use them through infinity.kernels, which checks the arguments.";

    py::enum_<Dtype>(m, "Dtype").value("f32", Dtype::f32).value("bf16", Dtype::bf16).value("f16", Dtype::f16);
    py::class_<AdamScalars>(m, "AdamScalars")
        .def(py::init(&adam_scalars), py::kw_only(), py::arg("lr"), py::arg("beta1"), py::arg("beta2"), py::arg("eps"),
             py::arg("weight_decay"), py::arg("step"), py::arg("decoupled"), py::arg("grad_scale"));

    const auto no_gil = py::call_guard<py::gil_scoped_release>();
    m.def(
        "adam_fp32",
        [](size_t n, uintptr_t param, uintptr_t exp_avg, uintptr_t exp_avg_sq, uintptr_t grad, Dtype grad_dtype,
           const AdamScalars& scalars) {
            run_update({ParamKind::f32, at<void>(param), nullptr, at<float>(exp_avg), at<float>(exp_avg_sq),
                        at<void>(grad), grad_dtype, scalars},
                       n);
        },
        no_gil);
    m.def(
        "adam_split",
        [](size_t n, uintptr_t param, uintptr_t low_bits, uintptr_t exp_avg, uintptr_t exp_avg_sq, uintptr_t grad,
           Dtype grad_dtype, const AdamScalars& scalars) {
            run_update({ParamKind::split, at<void>(param), at<void>(low_bits), at<float>(exp_avg),
                        at<float>(exp_avg_sq), at<void>(grad), grad_dtype, scalars},
                       n);
        },
        no_gil);
    m.def(
        "grad_store",
        [](size_t n, uintptr_t dst, Dtype dst_dtype, uintptr_t src, Dtype src_dtype, bool accumulate, float scale) {
            const GradStats stats =
                run_grad_store({at<void>(dst), dst_dtype, at<void>(src), src_dtype, accumulate, scale}, n);
            return std::pair<double, bool>(stats.sum_sq, stats.finite);
        },
        no_gil);
    m.def(
        "split_master",
        [](size_t n, uintptr_t master, uintptr_t param, uintptr_t low_bits) {
            run_split(at<float>(master), at<uint16_t>(param), at<int16_t>(low_bits), n);
        },
        no_gil);
    m.def(
        "join_master",
        [](size_t n, uintptr_t param, uintptr_t low_bits, uintptr_t master) {
            run_join(at<uint16_t>(param), at<int16_t>(low_bits), at<float>(master), n);
        },
        no_gil);
    m.def(
        "bare_loop",
        [](size_t n, uintptr_t param, uintptr_t exp_avg, uintptr_t exp_avg_sq, uintptr_t grad) {
            run_bare(at<float>(param), at<float>(exp_avg), at<float>(exp_avg_sq), at<float>(grad), n);
        },
        no_gil);

    m.def("instruction_sets", &instruction_sets);
    m.def("active_instruction_set", [] { return std::string(active_kernels().name); });
    m.def("use_instruction_set", &use_instruction_set);
    m.def("thread_count", &thread_count);
    m.def("set_thread_count", &set_thread_count);
}
