"""Training scripts of several kinds, as text. Each prints its losses as JSON in the last line but one, then a hash of the weights."""

from __future__ import annotations

_BEGIN = """
import hashlib, json, torch
from torch import nn
torch.manual_seed(0)
x = torch.randn(96, 4)
y = x.sum(1, keepdim=True)
losses = []
def end(*models):
    print(json.dumps(losses))
    print(hashlib.sha256(b"".join(each.numpy().tobytes() for model in models for each in model.state_dict().values())).hexdigest())
"""

ACCUMULATING = f"""{_BEGIN}
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(6):
    total = 0.0
    for part in range(2):
        rows = torch.randint(96, (8,))
        loss = nn.functional.mse_loss(model(x[rows]), y[rows]) / 2
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(total)
    if step % 2 == 1:
        model.eval()
        with torch.no_grad():
            model(x[:4])
        model.train()
end(model)
"""

GAN = f"""{_BEGIN}
generator, critic = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
steps_critic, steps_generator = torch.optim.SGD(critic.parameters(), lr=0.1), torch.optim.SGD(generator.parameters(), lr=0.1)
for step in range(6):
    critic.zero_grad()
    real = -critic(x[:8]).mean()
    real.backward()
    fake = critic(generator(torch.randn(8, 2)).detach()).mean()
    fake.backward()
    losses.append((real + fake).item())
    steps_critic.step()
    generator.zero_grad()
    (-critic(generator(torch.randn(8, 2))).mean()).backward()
    steps_generator.step()
end(generator, critic)
"""

ACTOR_AND_CRITIC = f"""{_BEGIN}
actor, critic = nn.Linear(4, 2), nn.Linear(4, 1)
steps_actor, steps_critic = torch.optim.SGD(actor.parameters(), lr=0.1), torch.optim.SGD(critic.parameters(), lr=0.1)
for step in range(6):
    chosen = actor(x[step : step + 1])
    loss = chosen.square().mean()
    steps_actor.zero_grad()
    loss.backward()
    steps_actor.step()
    losses.append(loss.item())
    steps_critic.zero_grad()
    critic(x[:3]).square().mean().backward()
    steps_critic.step()
end(actor, critic)
"""

CLOSURES = f"""{_BEGIN}
model = nn.Linear(4, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)
for step in range(8):
    latest = []
    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        latest.append(loss.item())
        return loss
    optimizer.step(closure)
    losses.append(latest[-1])
end(model)
"""

SCALED = f"""{_BEGIN}
from torch.utils.data import DataLoader, TensorDataset
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
for inputs, targets in DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
    if len(losses) == 2:
        loss = loss * float("inf")  # the scaler skips this step
    scaler.scale(loss).backward()
    losses.append(loss.item())
    scaler.step(optimizer)
    scaler.update()
end(model)
"""

EVAL_MODE = f"""{_BEGIN}
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
    def forward(self, *, inputs):
        return self.head(self.body(inputs))
model = Net().eval()
optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
for step in range(6):
    loss = nn.functional.mse_loss(model(inputs=x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
end(model)
"""

LEFT_EARLY = f"""{_BEGIN}
from torch.utils.data import DataLoader, TensorDataset
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True, num_workers=1)
for epoch in range(2):
    for number, (inputs, targets) in enumerate(loader):
        if number == 3:
            break
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
end(model)
"""

COMPILED = f"""{_BEGIN}
model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
compiled = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    loss = nn.functional.mse_loss(compiled(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
end(model)
"""

COMPILED_IN_PLACE = COMPILED.replace(
    'compiled = torch.compile(model, backend="aot_eager")', 'model.compile(backend="aot_eager"); compiled = model'
)

SCRIPTS: dict[str, tuple[str, int, int]] = {
    "accumulating": (ACCUMULATING, 6, 1),
    "gan": (GAN, 6, 1),
    "actor_and_critic": (ACTOR_AND_CRITIC, 6, 1),
    "closures": (CLOSURES, 8, 1),
    "scaled": (SCALED, 6, 1),
    "eval_mode": (EVAL_MODE, 6, 1),
    "left_early": (LEFT_EARLY, 6, 2),
    "compiled": (COMPILED, 8, 1),
    "compiled_in_place": (COMPILED_IN_PLACE, 8, 1),
}
"""By name: the script, its steps and its epochs."""
