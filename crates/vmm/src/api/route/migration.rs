//! Requests that are about migrations.

use std::time::Duration;

use super::{Fields, Operation, Parameters, expect_no_fields};
use crate::api::http::Request;
use crate::api::migration::{
    DEFAULT_DOWNTIME_MS, FreePageChoice, MAX_DOWNTIME_MS, MAX_MIGRATION_SECONDS,
    MAX_MIGRATION_STREAMS, MAX_MIGRATION_WAIT_MS, MigrationRequest, OnTimeout, TlsPaths,
};
use crate::api::reply::Problem;

pub(super) fn migrate(request: &Request<'_>) -> Result<Operation, Problem> {
    Parameters::of_query(request, &[])?;
    let fields = Fields::of_body(request, &MIGRATION_FIELDS)?;
    let mut migration = MigrationRequest::new(fields.text("to", "tcp:HOST:PORT or unix:PATH")?);
    if let Some(streams) =
        fields.optional_integer("streams", "streams", 1..=MAX_MIGRATION_STREAMS)?
    {
        migration.streams = u16::try_from(streams).unwrap_or(1);
    }
    let downtime = fields.optional_integer("downtime_ms", "milliseconds", 1..=MAX_DOWNTIME_MS)?;
    migration.downtime_ms = downtime.unwrap_or(DEFAULT_DOWNTIME_MS);
    let rates = MIN_BANDWIDTH_BYTES..=u64::MAX;
    migration.bandwidth_bytes_per_s =
        fields.optional_integer("bandwidth_bytes_per_s", "bytes", rates)?;
    let seconds = 1..=MAX_MIGRATION_SECONDS;
    migration.timeout_seconds = fields.optional_integer("timeout_seconds", "seconds", seconds)?;
    if let Some(action) = fields.optional_word("on_timeout", &OnTimeout::ALL, OnTimeout::name)? {
        migration.on_timeout = action;
    }
    if let Some(choice) =
        fields.optional_word("free_pages", &FreePageChoice::ALL, FreePageChoice::name)?
    {
        migration.free_pages = choice;
    }
    for (name, switch) in [
        ("auto_converge", &mut migration.auto_converge),
        ("zero_pages", &mut migration.zero_pages),
        ("holes", &mut migration.holes),
        ("insecure", &mut migration.insecure),
        ("share_memory", &mut migration.share_memory),
    ] {
        *switch = fields.optional_switch(name)?.unwrap_or(*switch);
    }
    migration.tls = tls_paths(&fields)?;
    Ok(Operation::Migrate(Box::new(migration)))
}

/// All fields of a migration's request.
pub(super) const MIGRATION_FIELDS: [&str; 16] = [
    "to",
    "streams",
    "downtime_ms",
    "bandwidth_bytes_per_s",
    "timeout_seconds",
    "on_timeout",
    "auto_converge",
    "free_pages",
    "zero_pages",
    "holes",
    "tls_cert",
    "tls_key",
    "tls_ca",
    "tls_name",
    "insecure",
    "share_memory",
];

/// The slowest rate that can be asked for: below, not even the state of a machine gets through in
/// reasonable time.
pub const MIN_BANDWIDTH_BYTES: u64 = 64 << 10;

/// All three files, or none.
fn tls_paths(fields: &Fields) -> Result<Option<TlsPaths>, Problem> {
    let names = ["tls_cert", "tls_key", "tls_ca"];
    if !names.iter().chain(&["tls_name"]).any(|name| fields.has(name)) {
        return Ok(None);
    }
    let name = fields.has("tls_name").then(|| fields.text("tls_name", "the name in a certificate"));
    let [cert, key, ca] = names.map(|name| fields.path(name));
    Ok(Some(TlsPaths { cert: cert?, key: key?, ca: ca?, name: name.transpose()? }))
}

pub(super) fn migration(request: &Request<'_>) -> Result<Operation, Problem> {
    let parameters = Parameters::of_query(request, &["wait_ms"])?;
    expect_no_fields(request)?;
    let wait_ms = parameters.integer("wait_ms")?.map(|wait_ms| wait_ms.min(MAX_MIGRATION_WAIT_MS));
    Ok(Operation::Migration { wait: wait_ms.map(Duration::from_millis) })
}
