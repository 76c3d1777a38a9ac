"""Certificates of an authority that lasts for one test."""

from __future__ import annotations

from pathlib import Path

import trustme


def certificate_files(folder: Path, name: str = "127.0.0.1") -> dict[str, Path]:
    """PEM files by part: `ca`, and `cert` and `key` of whoever is called `name`."""
    authority = trustme.CA()
    pair = authority.issue_cert(name)
    files = {part: folder / f"{part}.pem" for part in ("ca", "cert", "key")}
    authority.cert_pem.write_to_path(files["ca"])
    pair.cert_chain_pems[0].write_to_path(files["cert"])
    pair.private_key_pem.write_to_path(files["key"])
    return files


def tls_environment(folder: Path) -> dict[str, str]:
    """What services and commands are told, so that each shows a certificate and asks for one."""
    return {f"DIPTYCH_TLS_{part.upper()}": str(path) for part, path in certificate_files(folder).items()}
