"""The commands and their options. What each does is in a module of its own, imported when it is called.

Exit status: 0, 1 when something failed, 2 when the command line is wrong, 130 after Ctrl-C.
"""

import io
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Final

import typer

from diptych.cli.console import err, out, show_bug, show_error
from diptych.domain.errors import DiptychError, OurError

DEFAULT_MODEL: Final = "smollm2-135m"

app = typer.Typer(
    name="diptych",
    help="LLM inference with prefill and decode as separate services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


class Profile(StrEnum):
    """What the engine promises of its numbers."""

    FAST = "fast"
    EXACT = "exact"


Model = Annotated[
    str, typer.Option(help="smollm2-135m, toy, a directory, a .gguf file, or ORG/NAME on the hub")
]
ProfileOption = Annotated[
    Profile, typer.Option(help="fast: bf16; exact: fp32, the same ids however work is split")
]
Router = Annotated[
    str, typer.Option(metavar="HOST:PORT", help="else DIPTYCH_ROUTER, else the running `diptych up`")
]
Served = Annotated[str, typer.Option("--model", help="a served model; empty: the only one")]
MaxTokens = Annotated[int, typer.Option(help="most tokens of the answer")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token")]


@app.command()
def up(
    model: Model = DEFAULT_MODEL,
    profile: ProfileOption = Profile.FAST,
    prefill: Annotated[
        int | None, typer.Option(help="prefill workers (default: 1, or 0 with --both)")
    ] = None,
    decode: Annotated[int | None, typer.Option(help="decode workers (default: 1, or 0 with --both)")] = None,
    both: Annotated[int, typer.Option(help="workers that do both, for comparison")] = 0,
    port: Annotated[int, typer.Option(help="the router's port; 0: a free one")] = 0,
    threshold: Annotated[
        int | None,
        typer.Option(help="longest uncached rest, in tokens, that a decode worker prefills itself"),
    ] = None,
    redis_url: Annotated[str, typer.Option(envvar="REDIS_URL", help="a store; empty: an embedded one")] = "",
    shard: Annotated[str, typer.Option(help="prefix of all keys in the store")] = "main",
) -> None:
    """Start everything on this machine, and keep it running until Ctrl-C."""
    from diptych.cli.assemble import UpOptions
    from diptych.cli.up import run_up

    default = 0 if both else 1
    run_up(
        UpOptions(
            model=model,
            profile=profile.value,
            num_prefill=default if prefill is None else prefill,
            num_decode=default if decode is None else decode,
            num_both=both,
            port=port,
            redis_url=redis_url,
            shard=shard,
            threshold_tokens=threshold,
        )
    )


@app.command()
def demo(model: Model = DEFAULT_MODEL, profile: ProfileOption = Profile.FAST) -> None:
    """One long prompt: prefilled on one worker, decoded on another, and where its time went."""
    from diptych.cli.demo import run_demo

    run_demo(model, profile.value)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="the text to continue; - reads it from standard input")],
    model: Served = "",
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: Annotated[
        float, typer.Option(help="draw from the likeliest tokens with this share together")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(help="the same seed draws the same tokens")] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="a string that ends the answer; may be repeated")
    ] = None,
    router: Router = "",
) -> None:
    """Continue a prompt."""
    from diptych.cli.talk import answer_once, read_prompt
    from diptych.client.requests import Options

    options: Options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "stop": stop or [],
    }
    if seed is not None:
        options["seed"] = seed
    answer_once(router, read_prompt() if prompt == "-" else prompt, model, options)


@app.command()
def chat(
    model: Served = "",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    router: Router = "",
) -> None:
    """Talk to a model. Ctrl-C ends an answer, Ctrl-D the chat."""
    from diptych.cli.talk import chat_on

    chat_on(router, model, max_tokens, temperature)


@app.command()
def status(
    router: Router = "",
    as_json: Annotated[bool, typer.Option("--json", help="everything, for programs")] = False,
) -> None:
    """Show the router and its workers."""
    from diptych.cli.report import print_status, status_json
    from diptych.cli.talk import router_at

    with router_at(router) as client:
        answer = client.status()
    if as_json:
        print(status_json(answer))
    else:
        print_status(out, client.address, answer)


@app.command()
def models(router: Router = "") -> None:
    """Show the models that are served."""
    from diptych.cli.report import print_models
    from diptych.cli.talk import router_at

    with router_at(router) as client:
        print_models(out, client.models())


@app.command()
def audit(
    router: Router = "",
    redis_url: Annotated[
        str, typer.Option(help="the store; else DIPTYCH_REDIS_URL, REDIS_URL, or that of the running `up`")
    ] = "",
    shard: Annotated[str, typer.Option(help="prefix of all keys in the store")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="everything, for programs")] = False,
) -> None:
    """Show what every process and the store hold. Exit status 1 where something should not be there."""
    import asyncio

    from diptych.cli import audit as auditing
    from diptych.cli.census import find_place

    place = find_place(router, redis_url, shard)
    census, found = asyncio.run(auditing.examine(place))
    if as_json:
        print(auditing.audit_json(census, found))
    else:
        auditing.print_audit(out, census, found)
    if found:
        raise typer.Exit(1)


@app.command()
def net(
    router: Router = "",
    as_json: Annotated[bool, typer.Option("--json", help="everything, for programs")] = False,
) -> None:
    """Show how far decode workers are from prefill workers: round trip and bandwidth of the KV channel."""
    import asyncio

    from diptych.cli import net as links
    from diptych.cli.census import find_place, take

    census = asyncio.run(take(find_place(router, "", ""), with_store=False))
    if as_json:
        print(links.links_json(census.members))
    else:
        out.print(links.links_table(census.members))


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="everything, for programs")] = False,
) -> None:
    """Say what this machine offers, and what each lack costs. Exit status 1 where nothing would run."""
    from diptych.cli import doctor as examination

    findings = examination.examine()
    if as_json:
        print(examination.findings_json(findings))
    else:
        examination.print_findings(out, findings)
    if examination.is_broken(findings):
        raise typer.Exit(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script; ends with SystemExit."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character gets another
    try:
        app(args=None if arguments is None else list(arguments), prog_name="diptych")
    except DiptychError as error:
        show_error(error)
        sys.exit(1)
    except KeyboardInterrupt:
        err.print("[dim]interrupted")
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read our output has left. Python would complain once more when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        show_error(OurError(str(error)))
        sys.exit(1)
    except Exception as error:  # noqa: BLE001  # the boundary: whatever escapes is our bug
        show_bug(error)
        sys.exit(1)


if __name__ == "__main__":
    main()
