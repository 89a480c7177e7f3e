"""What runs inside the sandbox. These files see nothing of the rest of Rillflow: the standard library only, no import
from outside this folder. None of them holds a secret: a candidate may read and change all of it in its own process,
and whatever it then says is judged by processes it cannot reach."""
