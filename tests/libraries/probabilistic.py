"""gpytorch, torchdiffeq, torchsde and torchmetrics: kernels, flows and running statistics."""

from typing import Any

import torch
from torch import Tensor, nn, randn

import whence
from tests.libraries.rows import OWN_FUNCTION, Applied, Rows, decided, given, refused, untrained

row = Rows()


def dense(kernel: nn.Module, *points: Tensor) -> Any:
    return kernel(*points).to_dense()


COMPARES = decided(
    "torch.equal",
    "it asks whether two sets of points are equal, and computes otherwise if so",
    decide=("joint",),
)


@row("gpytorch.kernels", lambda: given(randn(4, 2)), **COMPARES)
def radial_kernel(kernels: Any) -> nn.Module:
    return Applied(dense, kernels.ScaleKernel(kernels.RBFKernel()))


@row("gpytorch.kernels", lambda: given(randn(4, 2), randn(3, 2)))
def cross_kernel(kernels: Any) -> nn.Module:
    return Applied(dense, kernels.ScaleKernel(kernels.MaternKernel(nu=1.5, ard_num_dims=2)))


@row("gpytorch.kernels", lambda: given(randn(4, 2)), **COMPARES)
def linear_kernel(kernels: Any) -> nn.Module:
    return Applied(dense, kernels.LinearKernel() + kernels.PeriodicKernel())


def exact_forward(model: Any, x: Tensor) -> Any:
    return model.distribution(model.mean(x), model.kernel(x))


def log_likelihood(model: Any, likelihood: Any, objective: Any, x: Tensor, y: Tensor) -> Tensor:
    return -objective(model(x), y)


POINTS = torch.linspace(0, 1, 6)


@row("gpytorch", lambda: given(POINTS, POINTS.sin()), **COMPARES)
def exact_gaussian_process(gpytorch: Any) -> nn.Module:
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    model = type("Exact", (gpytorch.models.ExactGP,), {"forward": exact_forward})(
        POINTS, POINTS.sin(), likelihood
    )
    model.mean = gpytorch.means.ConstantMean()
    model.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    model.distribution = gpytorch.distributions.MultivariateNormal
    return Applied(
        log_likelihood, model, likelihood, gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    )


@row(
    "gpytorch",
    lambda: given(POINTS[:, None], POINTS.sin()),
    **refused(
        whence.DataDependent, "updated_strategy", "a buffer says whether the parameters are of an old version"
    ),
)
def variational_gaussian_process(gpytorch: Any) -> nn.Module:
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    variational = gpytorch.variational
    model = type("Approximate", (gpytorch.models.ApproximateGP,), {"forward": exact_forward})(None)
    model.variational_strategy = variational.VariationalStrategy(
        model, torch.rand(3, 1), variational.CholeskyVariationalDistribution(3)
    )
    model.mean = gpytorch.means.ConstantMean()
    model.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
    model.distribution = gpytorch.distributions.MultivariateNormal
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=6)
    return Applied(log_likelihood, model, likelihood, objective)


class Field(nn.Module):
    """The right side of a differential equation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return (self.linear(y) * t).tanh()


class Solved:
    """A solver of ordinary differential equations with its settings."""

    def __init__(self, solve: Any, **settings: Any) -> None:
        self.solve, self.settings = solve, settings

    def __call__(self, field: nn.Module, start: Tensor, times: Tensor | None = None) -> Any:
        return self.solve(field, start, torch.linspace(0, 1, 3) if times is None else times, **self.settings)


def start() -> Any:
    return given(randn(2, 4))


@row(
    "torchdiffeq",
    lambda: given(randn(2, 4), torch.linspace(0, 1, 3)),
    **decided(
        "needs the value of all",
        "it asks whether the times that it is given increase",
        decide=("forward", "joint"),
    ),
)
def times_as_an_argument(library: Any) -> nn.Module:
    return Applied(Solved(library.odeint, method="rk4"), Field())


@row("torchdiffeq", start)
def runge_kutta(library: Any) -> nn.Module:
    return Applied(Solved(library.odeint, method="rk4"), Field())


@row("torchdiffeq", start)
def euler(library: Any) -> nn.Module:
    return Applied(Solved(library.odeint, method="euler", options={"step_size": 0.25}), Field())


@row(
    "torchdiffeq",
    start,
    **decided("", "the next step's size is chosen by the error of the last", decide=("joint",)),
)
def adaptive_steps(library: Any) -> nn.Module:
    return Applied(Solved(library.odeint, method="dopri5"), Field())


@row("torchdiffeq", start, forward_alone=OWN_FUNCTION)
def adjoint(library: Any) -> nn.Module:
    return Applied(Solved(library.odeint_adjoint, method="rk4"), Field())


class Stochastic(nn.Module):
    """Drift and diffusion."""

    noise_type, sde_type = "diagonal", "ito"

    def __init__(self) -> None:
        super().__init__()
        self.drift, self.diffusion = nn.Linear(4, 4), nn.Linear(4, 4)

    def f(self, t: Tensor, y: Tensor) -> Tensor:
        return self.drift(y).tanh()

    def g(self, t: Tensor, y: Tensor) -> Tensor:
        return self.diffusion(y).sigmoid()


@row(
    "torchsde",
    start,
    **refused(
        whence.UnsupportedGenerator, "generator", "its noise is drawn from generators that it seeds itself"
    ),
)
def stochastic(library: Any) -> nn.Module:
    return Applied(Solved(library.sdeint, method="euler", dt=0.5), Stochastic())


@row(
    "torchmetrics.image",
    lambda: given(torch.rand(1, 3, 16, 16), torch.rand(1, 3, 16, 16)),
    **untrained("a metric"),
)
def similarity_metric(library: Any) -> nn.Module:
    return library.StructuralSimilarityIndexMeasure(data_range=1.0)


@row("torchmetrics", lambda: given(randn(8), randn(8)), **untrained("a metric"))
def squared_error_metric(library: Any) -> nn.Module:
    return library.MeanSquaredError()


@row("torchmetrics", lambda: given(torch.rand(8, 3), torch.randint(0, 3, (8,))), **untrained("a metric"))
def accuracy_metric(library: Any) -> nn.Module:
    return library.Accuracy(task="multiclass", num_classes=3, validate_args=False)
