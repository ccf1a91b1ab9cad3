# SPDX-License-Identifier: BSD-3-Clause
"""Training with Horovod and PyTorch. It knows nothing of Tributary."""

import horovod.torch as hvd
import torch

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(8, 1)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
for _ in range(200):
    inputs = torch.randn(32, 8)  # other ones on each rank
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
largest = hvd.allreduce((model.weight.detach() - 1).abs().max(), op=hvd.Max, name="largest")
if hvd.rank() == 0:
    print(f"{hvd.size()} ranks, farthest weight from its target: {largest.item():.4f}")
