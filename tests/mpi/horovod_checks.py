# SPDX-License-Identifier: BSD-3-Clause
"""Horovod's operations on tensors in GPU memory, each compared with a result worked out by hand, and then a training.

It knows nothing of Tributary. To be run by hand, as docs/quickstart.md says: Horovod has to be built with HOROVOD_GPU_OPERATIONS=MPI. Ranks
share GPUs where there are fewer of these. With --cpu everything is in host memory, which any Horovod with MPI can do.
"""

import argparse
import faulthandler
import os
import sys
import traceback

import horovod.torch as hvd
import torch

SIZES = (1, 1000, 1000003)
DTYPES = (torch.float32, torch.float64, torch.int64, torch.float16)
STEPS = 50
BATCH = 64


def contribution(rank, count, dtype=torch.float64, start=0):
    """What a rank gives: small integers, so that sums are exact in each type, and other ones in each place and on each rank."""
    places = torch.arange(start, start + count)
    return ((places * 7 + places // 64 + rank * 5) % 13 - 6).to(dtype)


def combine(op, count, start=0):
    """The contributions of all ranks reduced, in double precision."""
    given = torch.stack([contribution(rank, count, start=start) for rank in range(hvd.size())])
    if op == hvd.Min:
        return given.amin(0)
    if op == hvd.Max:
        return given.amax(0)
    return given.sum(0) / (hvd.size() if op == hvd.Average else 1)


class Checks:
    """All checks. A method whose name begins with "check_" is one."""

    def __init__(self, device, verbose):
        self.device = device
        self.verbose = verbose

    @staticmethod
    def names():
        return [name.removeprefix("check_") for name in vars(Checks) if name.startswith("check_")]

    def run(self, names):
        for name in names:
            self.say(name)
            getattr(self, "check_" + name)()

    def say(self, what):
        if self.verbose and hvd.rank() == 0:
            print(f"horovod: {what}", file=sys.stderr, flush=True)

    def settle(self):
        """Waits for the GPU. Horovod scales averages on a stream of its own and, where the MPI did the sum, does not wait for it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def mine(self, count, dtype, start=0):
        return contribution(hvd.rank(), count, dtype, start).to(self.device)

    def same(self, what, got, expected, average=False):
        """Sums are exact, averages rounded: by float16, or, of integers, towards zero."""
        self.settle()
        if got.device.type != self.device.type:
            raise AssertionError(f"{what}: result in memory of {got.device}")
        if got.shape != expected.shape:
            raise AssertionError(
                f"{what}: shape {tuple(got.shape)} and not {tuple(expected.shape)}"
            )
        tolerance = 0.0
        if average:
            of_floats = {torch.float16: 1e-2, torch.float32: 1e-5, torch.float64: 1e-12}
            tolerance = of_floats.get(got.dtype, 1.0)
        # not "any above", which a NaN would pass
        wrong = ~((got.cpu().double() - expected.double()).abs() <= tolerance)
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            raise AssertionError(
                f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, the first at {place}:"
                f" {got[place].item()} and not {expected[place].item()}"
            )

    def check_allreduce(self):
        for dtype in DTYPES:
            for count in SIZES:
                for name in ("Sum", "Average", "Min", "Max"):
                    op = getattr(hvd, name)
                    tensor = self.mine(count, dtype)
                    given = tensor.clone()
                    what = f"allreduce {name} {dtype} {count}"
                    self.same(
                        what,
                        hvd.allreduce(tensor, op=op, name=what),
                        combine(op, count),
                        op == hvd.Average,
                    )
                    if not torch.equal(tensor, given):
                        raise AssertionError(f"{what}: changed its input")
                what = f"allreduce in place {dtype} {count}"
                tensor = self.mine(count, dtype)
                hvd.allreduce_(tensor, op=hvd.Sum, name=what)
                self.same(what, tensor, combine(hvd.Sum, count))

    def check_allreduce_scaled(self):
        """Afterwards only: before a sum of the MPI, Horovod does not wait for the scaling, so the result would be anyone's guess."""
        for count in SIZES:
            what = f"allreduce scaled {count}"
            got = hvd.allreduce(
                self.mine(count, torch.float32), op=hvd.Sum, postscale_factor=0.5, name=what
            )
            self.same(what, got, combine(hvd.Sum, count) * 0.5)

    def check_allreduce_many_at_once(self):
        """Horovod puts those that are ready into one buffer, and calls MPI once."""
        counts = [1 + 977 * i for i in range(40)]
        for dtype in DTYPES:
            handles = [
                hvd.allreduce_async(
                    self.mine(count, dtype, i), op=hvd.Sum, name=f"many {dtype} {i}"
                )
                for i, count in enumerate(counts)
            ]
            for i, (count, handle) in enumerate(zip(counts, handles, strict=True)):
                self.same(f"many {dtype} {i}", hvd.synchronize(handle), combine(hvd.Sum, count, i))

    def check_allreduce_unaligned(self):
        """A view that begins inside an allocation."""
        for dtype in DTYPES:
            whole = self.mine(10001, dtype)
            what = f"unaligned {dtype}"
            hvd.allreduce_(whole[1:], op=hvd.Sum, name=what)
            self.same(what, whole[1:], combine(hvd.Sum, 10000, 1))
            self.same(what + ", the element before", whole[:1], contribution(hvd.rank(), 1))

    def check_allreduce_beside_work(self):
        """Operands that the GPU still computes when Horovod gets them."""
        for i in range(20):
            tensor = self.mine(100000, torch.float32, i)
            for _ in range(50):
                tensor = tensor.mul(2).mul(0.5)
            what = f"beside work {i}"
            self.same(
                what, hvd.allreduce(tensor, op=hvd.Sum, name=what), combine(hvd.Sum, 100000, i)
            )

    def check_grouped_allreduce(self):
        for dtype in DTYPES:
            for name in ("Sum", "Average"):
                op = getattr(hvd, name)
                what = f"grouped allreduce {name} {dtype}"
                tensors = [self.mine(count, dtype, i) for i, count in enumerate(SIZES)]
                results = hvd.grouped_allreduce(tensors, op=op, name=what)
                for i, (count, got) in enumerate(zip(SIZES, results, strict=True)):
                    self.same(f"{what} {count}", got, combine(op, count, i), op == hvd.Average)

    def check_broadcast(self):
        for dtype in DTYPES:
            for root in range(hvd.size()):
                what = f"broadcast {dtype} from {root}"
                self.same(
                    what,
                    hvd.broadcast(self.mine(1003, dtype), root, name=what),
                    contribution(root, 1003),
                )

    def check_broadcast_parameters(self):
        for root in {0, hvd.size() - 1}:
            model = new_model(seed=hvd.rank()).to(self.device)
            # its state has an integer, too
            model.running = torch.nn.BatchNorm1d(1000).to(self.device)
            for tensor in model.running.state_dict().values():
                tensor.fill_(hvd.rank() + 1)
            hvd.broadcast_parameters(model.state_dict(), root_rank=root)
            for name, expected in new_model(seed=root).state_dict().items():
                self.same(
                    f"broadcast_parameters {name} from {root}", model.state_dict()[name], expected
                )
            for name, got in model.running.state_dict().items():
                self.same(
                    f"broadcast_parameters {name} from {root}", got, torch.full(got.shape, root + 1)
                )

    def check_allgather(self):
        for dtype in DTYPES:
            # rank 0 gives this many, each other rank one more than the one before it
            for rows in (0, 1, 5000):
                what = f"allgather {dtype} {rows}"
                counts = [rows + rank for rank in range(hvd.size())]
                expected = [
                    contribution(rank, count * 3).view(count, 3)
                    for rank, count in enumerate(counts)
                ]
                got = hvd.allgather(self.mine(counts[hvd.rank()] * 3, dtype).view(-1, 3), name=what)
                self.same(what, got, torch.cat(expected))

    def check_alltoall(self):
        for dtype in DTYPES:
            for rows in (1, 5000):
                what = f"alltoall {dtype} {rows}"
                begin = hvd.rank() * rows
                expected = [
                    contribution(rank, hvd.size() * rows)[begin : begin + rows]
                    for rank in range(hvd.size())
                ]
                got = hvd.alltoall(self.mine(hvd.size() * rows, dtype), name=what)
                self.same(what, got, torch.cat(expected))

    def check_reducescatter(self):
        for dtype in DTYPES:
            for rows in (hvd.size(), 1000, 333337):
                for name in ("Sum", "Average"):
                    op = getattr(hvd, name)
                    what = f"reducescatter {name} {dtype} {rows}"
                    got = hvd.reducescatter(
                        self.mine(rows * 3, dtype).view(rows, 3), op=op, name=what
                    )
                    expected = self.part(combine(op, rows * 3).view(rows, 3))
                    self.same(what, got, expected, op == hvd.Average)

    def check_grouped_reducescatter(self):
        what = "grouped reducescatter"
        tensors = [
            self.mine(rows * 3, torch.float32, rows).view(rows, 3) for rows in (10, 1000, 100003)
        ]
        for tensor, got in zip(
            tensors, hvd.grouped_reducescatter(tensors, op=hvd.Sum, name=what), strict=True
        ):
            rows = len(tensor)
            self.same(
                f"{what} {rows}", got, self.part(combine(hvd.Sum, rows * 3, rows).view(rows, 3))
            )

    @staticmethod
    def part(whole):
        """This rank's rows: all get as many, and the first ranks one more each where there is a rest."""
        each, rest = divmod(len(whole), hvd.size())
        begin = hvd.rank() * each + min(hvd.rank(), rest)
        return whole[begin : begin + each + (hvd.rank() < rest)]

    def check_training(self):
        self.train(hvd.Compression.none, tolerance=1e-3)

    def check_training_with_float16_gradients(self):
        checks = self

        class Patient(hvd.Compression.fp16):
            """Horovod's own would read averages that are being scaled: see settle()."""

            @staticmethod
            def decompress(tensor, context):
                checks.settle()
                return hvd.Compression.fp16.decompress(tensor, context)

        self.train(Patient, tolerance=1e-2)

    def train(self, compression, tolerance):
        """Trains on a share of each batch, and beside it, without Horovod, a copy of the model on whole batches."""
        model = new_model(seed=hvd.rank()).to(self.device)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
            named_parameters=model.named_parameters(),
            compression=compression,
        )
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        alone = new_model(seed=0).to(self.device)
        optimizer_alone = torch.optim.SGD(alone.parameters(), lr=0.05, momentum=0.9)

        losses = []
        for step in range(STEPS):
            inputs, targets = (part.to(self.device) for part in new_batch(step))
            mine = slice(hvd.rank() * BATCH, (hvd.rank() + 1) * BATCH)
            optimizer.zero_grad()
            loss = (model(inputs[mine]) - targets[mine]).square().mean()
            loss.backward()
            optimizer.synchronize()
            self.settle()
            with optimizer.skip_synchronize():
                optimizer.step()
            losses.append(hvd.allreduce(loss.detach(), op=hvd.Average, name="loss"))
            self.settle()

            optimizer_alone.zero_grad()
            (alone(inputs) - targets).square().mean().backward()
            optimizer_alone.step()

        first, last = losses[0].item(), sum(losses[-5:]).item() / 5
        self.say(f"loss {first:.4f} at the first step, {last:.4f} over the last five")
        if not last < first / 4:
            raise AssertionError(f"loss {first} at the first step, still {last} over the last five")
        weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
        everyones = hvd.allgather(weights.cpu()[None], name="weights")
        for rank, theirs in enumerate(everyones):
            if not torch.equal(theirs, everyones[0]):
                raise AssertionError(
                    f"the weights of ranks 0 and {rank} differ by up to {(theirs - everyones[0]).abs().max()}"
                )
        expected = torch.cat([parameter.detach().flatten() for parameter in alone.parameters()])
        difference = (weights - expected).abs().max().item()
        self.say(f"weights differ by up to {difference:.2g} from those of a training on one rank")
        if not difference <= tolerance:
            raise AssertionError(
                f"the weights differ by up to {difference} from those of a training on one rank"
            )


def new_model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 256),
        torch.nn.Tanh(),
        torch.nn.Linear(256, 256),
        torch.nn.Tanh(),
        torch.nn.Linear(256, 1),
    )


def new_batch(step):
    """Inputs and targets for all ranks together, the same on each."""
    generator = torch.Generator().manual_seed(1000 + step)
    inputs = torch.randn(hvd.size() * BATCH, 16, generator=generator)
    return inputs, inputs[:, :4].sum(1, keepdim=True) / 2


def choose_device(cpu):
    if not hvd.mpi_enabled():
        raise RuntimeError("Horovod does not use MPI; it needs HOROVOD_WITH_MPI=1 when it is built")
    if cpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("PyTorch finds no GPU; --cpu does without")
    if not hvd.cuda_built() or hvd.nccl_built():
        raise RuntimeError(
            "Horovod has to be built with HOROVOD_GPU=CUDA HOROVOD_GPU_OPERATIONS=MPI"
        )
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cpu", action="store_true", help="use tensors in host memory")
    parser.add_argument(
        "--verbose", action="store_true", help="say on standard error which check begins"
    )
    parser.add_argument(
        "--only", nargs="+", choices=Checks.names(), metavar="CHECK", help="make these checks alone"
    )
    parser.add_argument("--list", action="store_true", help="print the names of the checks")
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(Checks.names()))
        return
    faulthandler.enable()
    hvd.init()
    try:
        device = choose_device(arguments.cpu)
        Checks(device, arguments.verbose).run(arguments.only or Checks.names())
        hvd.barrier()
    except BaseException:
        # At once and without Horovod's own end: the other ranks are inside calls that wait for this one, and mpiexec ends them.
        print(
            f"horovod: rank {hvd.rank()} of {hvd.size()} failed\n{traceback.format_exc()}",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)
    if hvd.rank() == 0:
        print("horovod: all checks passed", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
