"""Defines the type of `storage_options=`. `storage` translates its values for the engine."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import TypedDict, Union

_Text = Union[str, "PathLike[str]", None]
_Secret = str | bytes | None


class StorageOptions(TypedDict, total=False):
    """Options for reaching URIs other than local files, by scheme. None means that an option is not set. An option
    that the scheme of the URI does not have raises ArgumentError.

    http, https, hf: headers (a mapping), token (bearer), cacert, capath, insecure; timeout (seconds without
    progress, default 30), connections (the most connections, default 64; more are opened as long as each further
    connection makes the load faster), retries (default 8; a server that has never answered gets 3 attempts in all).
    Headers, token, and a URL's user and password are sent only to the scheme, host and port that they were given for,
    even after a redirect. A server without ETags and dates is read by a single request, in order. All files of an hf://
    URI come from one commit. `cache` is a folder that keeps whole files, or "on" for a folder in the user's cache
    folder, or "" for no cache; by default OVERWIRE_CACHE decides. Each file is fetched once, and compared with its hash
    on every use. If the store cannot be reached, the cached file is used.

    s3 (s3://bucket/key, s3://bucket/folder/): key, secret, token; profile; anon (unsigned); region,
    endpoint_url, path_style, sse_customer_key (32 bytes or their base64), cacert, timeout, connections, retries. The
    names of boto3 and obstore also work: aws_access_key_id, access_key_id, aws_secret_access_key,
    secret_access_key, aws_session_token, session_token, region_name, aws_region, aws_endpoint_url, endpoint,
    profile_name. By default credentials, region and endpoint come from the sources that AWS's own tools use: AWS_* in
    os.environ, shared files, web identity, SSO, credential processes, containers, instance metadata. If there are no
    credentials, requests are unsigned. A store without ETags and dates is read by a single request.

    redis, rediss (redis://user:password@host:port/key; only host and key are required): username, password (by default
    those in the URI, or REDISCLI_AUTH), db, cacert, timeout, connections, retries. A URI names a single value, or
    tensorizer's keys `key:...:offset`.

    .tensors files, in any location: decryption_key (32 bytes or 64 hex digits) or decryption_password to read,
    encryption_key or encryption_password to write. other_dtypes_as_bytes loads tensors with a dtype that
    safetensors lacks as "U8" with an extra dimension. verify_crc32 checks the CRC32 of plain tensors.

    In a Ray cluster, `ray` reads each object once for all nodes; see `load_file`.

    If an object is replaced in a store while it is read, the read raises CorruptError. It never mixes old and new
    bytes.
    """

    headers: Mapping[str, str] | None
    token: str | None
    cacert: _Text
    capath: _Text
    insecure: bool | None
    timeout: float | None
    connections: int | None
    retries: int | None
    cache: _Text
    key: str | None
    secret: str | None
    profile: str | None
    anon: bool | None
    region: str | None
    endpoint_url: str | None
    path_style: bool | None
    sse_customer_key: str | None
    aws_access_key_id: str | None
    access_key_id: str | None
    aws_secret_access_key: str | None
    secret_access_key: str | None
    aws_session_token: str | None
    session_token: str | None
    region_name: str | None
    aws_region: str | None
    aws_endpoint_url: str | None
    endpoint: str | None
    profile_name: str | None
    username: str | None
    password: str | None
    db: int | None
    decryption_key: _Secret
    decryption_password: _Secret
    encryption_key: _Secret
    encryption_password: _Secret
    other_dtypes_as_bytes: bool | None
    verify_crc32: bool | None
    ray: bool | None


StorageOptions.__module__ = "overwire"  # users import it from there
