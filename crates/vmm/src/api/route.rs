//! Routing: a pure function from [`Request`] to [`Operation`].

use std::time::Duration;

use schemars::JsonSchema;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::control::Operation;
use super::fields::{EmptyBody, Parameters, body, no_body, request_schema};
use super::http::Request;
use super::merge::MergeSettings;
use super::migration::MAX_MIGRATION_WAIT_MS;
use super::reply::{Problem, Status};

/// The methods in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Reads.
    Get,
    /// Changes; idempotent.
    Put,
}

impl Method {
    /// The method's name in HTTP.
    pub fn name(self) -> &'static str {
        match self {
            Self::Get => "GET",
            Self::Put => "PUT",
        }
    }
}

/// Turns a request whose method and path have matched into an operation.
type Build = fn(&Request<'_>) -> Result<Operation, Problem>;

/// One method of one path.
pub struct Route {
    /// The method.
    pub method: Method,
    /// The path.
    pub path: &'static str,
    build: Build,
}

const fn route_to(method: Method, path: &'static str, build: Build) -> Route {
    Route { method, path, build }
}

/// All routes.
pub const ROUTES: [Route; 31] = [
    route_to(Method::Get, "/openapi.json", |request| plain(request, Operation::OpenApi)),
    route_to(Method::Get, "/vm", |request| plain(request, Operation::VmInfo)),
    route_to(Method::Put, "/vm/pause", |request| with_optional(request, Operation::Pause)),
    route_to(Method::Put, "/vm/resume", |request| plain(request, Operation::Resume)),
    route_to(Method::Put, "/vm/power-button", |request| plain(request, Operation::PowerButton)),
    route_to(Method::Put, "/vm/trim", |request| plain(request, Operation::Trim)),
    route_to(Method::Get, "/vm/park", |request| plain(request, Operation::ParkStatus)),
    route_to(Method::Put, "/vm/park", |request| with_optional(request, Operation::Park)),
    route_to(Method::Put, "/vm/snapshot", |request| with(request, Operation::Snapshot)),
    route_to(Method::Get, "/vm/working-set", |request| plain(request, Operation::WorkingSet)),
    route_to(Method::Put, "/vm/checkpoint", |request| with(request, Operation::Checkpoint)),
    route_to(Method::Put, "/vm/migrate", |request| {
        with(request, |migration| Operation::Migrate(Box::new(migration)))
    }),
    route_to(Method::Get, "/vm/migration", migration),
    route_to(Method::Put, "/vm/migration/cancel", |request| {
        plain(request, Operation::CancelMigration)
    }),
    route_to(Method::Put, "/vm/kill", |request| plain(request, Operation::Kill)),
    route_to(Method::Get, "/balloon", |request| plain(request, Operation::Balloon)),
    route_to(Method::Put, "/balloon", |request| with(request, Operation::SetBalloon)),
    route_to(Method::Get, "/balloon/statistics", statistics),
    route_to(Method::Put, "/balloon/statistics-interval", |request| {
        with(request, Operation::SetStatisticsInterval)
    }),
    route_to(Method::Put, "/balloon/free-pages", |request| {
        with_optional(request, Operation::FreePages)
    }),
    route_to(Method::Put, "/balloon/reclaim", |request| with_optional(request, Operation::Reclaim)),
    route_to(Method::Get, "/disks", |request| plain(request, Operation::Disks)),
    route_to(Method::Put, "/disks", |request| with(request, Operation::ResizeDisk)),
    route_to(Method::Get, "/limits", |request| plain(request, Operation::Limits)),
    route_to(Method::Put, "/limits", |request| with(request, Operation::SetLimits)),
    route_to(Method::Get, "/net", |request| plain(request, Operation::Net)),
    route_to(Method::Put, "/net", |request| with(request, Operation::SetNet)),
    route_to(Method::Get, "/merge", |request| plain(request, Operation::Merge)),
    route_to(Method::Put, "/merge", set_merge),
    route_to(Method::Put, "/console", |request| plain(request, Operation::AttachConsole)),
    route_to(Method::Get, "/metrics", |request| plain(request, Operation::Metrics)),
];

/// The operation of `request`, or the reason of its refusal.
pub fn route(request: &Request<'_>) -> Result<Operation, Problem> {
    let mut allowed = Vec::new();
    for candidate in ROUTES.iter().filter(|candidate| candidate.path == request.path) {
        if candidate.method.name() == request.method {
            return (candidate.build)(request);
        }
        allowed.push(candidate.method.name());
    }
    if allowed.is_empty() {
        let message = format!("there is no '{}' in this API", request.path.escape_debug());
        return Err(Problem::new(Status::NotFound, message)
            .with_remedy("GET /openapi.json lists everything there is"));
    }
    let allow = allowed.join(", ");
    let message = format!("{} is not a method of {}", request.method.escape_debug(), request.path);
    let mut problem = Problem::new(Status::MethodNotAllowed, message)
        .with_remedy(format!("use {}", allowed.join(" or ")));
    problem.allow = Some(allow);
    Err(problem)
}

/// An operation without parameters.
fn plain(request: &Request<'_>, operation: Operation) -> Result<Operation, Problem> {
    Parameters::of_query(request, &[])?;
    no_body(request)?;
    Ok(operation)
}

/// An operation whose parameters are in the body.
fn with<T: JsonSchema + DeserializeOwned>(
    request: &Request<'_>,
    operation: impl FnOnce(T) -> Operation,
) -> Result<Operation, Problem> {
    Parameters::of_query(request, &[])?;
    body(request, EmptyBody::Refused).map(operation)
}

/// The same with defaults for all of them.
fn with_optional<T: JsonSchema + DeserializeOwned>(
    request: &Request<'_>,
    operation: impl FnOnce(T) -> Operation,
) -> Result<Operation, Problem> {
    Parameters::of_query(request, &[])?;
    body(request, EmptyBody::Allowed).map(operation)
}

fn statistics(request: &Request<'_>) -> Result<Operation, Problem> {
    let parameters = Parameters::of_query(request, &["max_age_ms"])?;
    no_body(request)?;
    let max_age = parameters.integer("max_age_ms")?.map(Duration::from_millis);
    Ok(Operation::Statistics { max_age })
}

fn migration(request: &Request<'_>) -> Result<Operation, Problem> {
    let parameters = Parameters::of_query(request, &["wait_ms"])?;
    no_body(request)?;
    let wait_ms = parameters.integer("wait_ms")?.map(|wait_ms| wait_ms.min(MAX_MIGRATION_WAIT_MS));
    Ok(Operation::Migration { wait: wait_ms.map(Duration::from_millis) })
}

fn set_merge(request: &Request<'_>) -> Result<Operation, Problem> {
    Parameters::of_query(request, &[])?;
    let change: MergeSettings = body(request, EmptyBody::Refused)?;
    if change == MergeSettings::default() {
        let message = "the object changes no setting";
        let fields = request_schema::<MergeSettings>();
        let fields = fields.get("properties").and_then(Value::as_object);
        let names: Vec<_> = fields.into_iter().flatten().map(|(name, _)| name.as_str()).collect();
        return Err(Problem::new(Status::UnprocessableContent, message)
            .with_remedy(format!("send some of {}", names.join(", "))));
    }
    if change.pages_per_second.is_some() && change.target_scan_seconds.is_some() {
        let message = "'pages_per_second' is a fixed pace, and 'target_scan_seconds' lets the pace \
                       follow from how much there is to scan";
        return Err(Problem::new(Status::UnprocessableContent, message)
            .with_field("pages_per_second")
            .with_remedy("send one of them"));
    }
    Ok(Operation::SetMerge(Box::new(change)))
}

#[cfg(test)]
mod tests;
