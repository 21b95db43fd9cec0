import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main():
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), gradient_accumulation_steps=2)
    torch.manual_seed(0)
    images, labels = (torch.tensor(array[:1792]) for array in load_digits(return_X_y=True))
    data = TensorDataset(images.float() / 16, labels)
    loader = DataLoader(data, batch_size=32 // accelerator.num_processes)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        total = 0.0
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach() / len(loader)
    total = accelerator.reduce(total, reduction="mean")
    accelerator.print(f"loss {total:.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
