"""`python -m linrnn COMMAND …` is `linrnn COMMAND …`."""

from linrnn.commands import main

if __name__ == "__main__":
    main()
