//! What a request asks for: a pure function from [`Request`] to [`Operation`].

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use serde::de::{Deserialize, Deserializer, MapAccess, Visitor};
use serde_json::Value;

use super::free_pages::MAX_FREE_PAGES_ORDER;
use super::http::Request;
use super::merge::MergeChange;
use super::migration::MigrationRequest;
use super::reply::{Problem, Status};

mod merge;
mod migration;

use merge::set_merge;
use migration::{migrate, migration};

pub use migration::MIN_BANDWIDTH_BYTES;

/// The longest interval between two requests for statistics: a day.
pub const MAX_STATISTICS_INTERVAL_SECONDS: u64 = 24 * 60 * 60;

/// How long a guest may take to name its free pages, unless the request says otherwise.
pub const FREE_PAGES_TIME_LIMIT_MS: u64 = 5000;

/// The longest that can be asked for: a minute.
pub const MAX_FREE_PAGES_TIME_LIMIT_MS: u64 = 60 * 1000;

/// Everything the API can do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Operation {
    /// `GET /openapi.json`
    OpenApi,
    /// `GET /vm`
    VmInfo,
    /// `PUT /vm/pause`
    Pause,
    /// `PUT /vm/resume`
    Resume,
    /// `PUT /vm/power-button`
    PowerButton,
    /// `PUT /vm/trim`
    Trim,
    /// `PUT /vm/snapshot`
    Snapshot {
        /// The file to write.
        path: PathBuf,
    },
    /// `PUT /vm/migrate`
    Migrate(Box<MigrationRequest>),
    /// `GET /vm/migration`
    Migration {
        /// How long to wait for its end.
        wait: Option<Duration>,
    },
    /// `PUT /vm/migration/cancel`
    CancelMigration,
    /// `PUT /vm/kill`
    Kill,
    /// `GET /balloon`
    Balloon,
    /// `PUT /balloon`
    SetBalloon {
        /// The size the balloon should get to.
        target_bytes: u64,
    },
    /// `GET /balloon/statistics`
    Statistics {
        /// Values at most this old will do without asking the guest.
        max_age: Option<Duration>,
    },
    /// `PUT /balloon/statistics-interval`
    SetStatisticsInterval {
        /// Time between two requests; `None` ends them.
        interval: Option<Duration>,
    },
    /// `PUT /balloon/free-pages`
    FreePages {
        /// The smallest order of interest.
        min_order: u8,
        /// How long the guest may take.
        time_limit: Duration,
    },
    /// `GET /merge`
    Merge,
    /// `PUT /merge`
    SetMerge(Box<MergeChange>),
    /// `GET /metrics`
    Metrics,
}

/// The methods in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Reads.
    Get,
    /// Changes; doing it twice is the same as doing it once.
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

/// Everything that is served.
pub const ROUTES: [Route; 19] = [
    route_to(Method::Get, "/openapi.json", |request| plain(request, Operation::OpenApi)),
    route_to(Method::Get, "/vm", |request| plain(request, Operation::VmInfo)),
    route_to(Method::Put, "/vm/pause", |request| plain(request, Operation::Pause)),
    route_to(Method::Put, "/vm/resume", |request| plain(request, Operation::Resume)),
    route_to(Method::Put, "/vm/power-button", |request| plain(request, Operation::PowerButton)),
    route_to(Method::Put, "/vm/trim", |request| plain(request, Operation::Trim)),
    route_to(Method::Put, "/vm/snapshot", snapshot),
    route_to(Method::Put, "/vm/migrate", migrate),
    route_to(Method::Get, "/vm/migration", migration),
    route_to(Method::Put, "/vm/migration/cancel", |request| {
        plain(request, Operation::CancelMigration)
    }),
    route_to(Method::Put, "/vm/kill", |request| plain(request, Operation::Kill)),
    route_to(Method::Get, "/balloon", |request| plain(request, Operation::Balloon)),
    route_to(Method::Put, "/balloon", set_balloon),
    route_to(Method::Get, "/balloon/statistics", statistics),
    route_to(Method::Put, "/balloon/statistics-interval", set_statistics_interval),
    route_to(Method::Put, "/balloon/free-pages", free_pages),
    route_to(Method::Get, "/merge", |request| plain(request, Operation::Merge)),
    route_to(Method::Put, "/merge", set_merge),
    route_to(Method::Get, "/metrics", |request| plain(request, Operation::Metrics)),
];

/// What `request` asks for, or why it cannot be done.
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
    expect_no_fields(request)?;
    Ok(operation)
}

/// A PUT without parameters may have an empty JSON object as its body, because some clients always
/// send one. A GET with a body is most likely meant to be a PUT.
fn expect_no_fields(request: &Request<'_>) -> Result<(), Problem> {
    if request.body.trim_ascii().is_empty() {
        return Ok(());
    }
    if request.method == Method::Get.name() {
        let message = format!("GET {} takes no body", request.path);
        return Err(
            Problem::new(Status::BadRequest, message).with_remedy("use PUT to change something")
        );
    }
    Fields::of_body(request, &[]).map(|_| ())
}

fn snapshot(request: &Request<'_>) -> Result<Operation, Problem> {
    Parameters::of_query(request, &[])?;
    let path = Fields::of_body(request, &["path"])?.path("path")?;
    Ok(Operation::Snapshot { path })
}

fn set_balloon(request: &Request<'_>) -> Result<Operation, Problem> {
    Parameters::of_query(request, &[])?;
    let fields = Fields::of_body(request, &["target_bytes"])?;
    Ok(Operation::SetBalloon { target_bytes: fields.integer("target_bytes", "bytes", u64::MAX)? })
}

fn statistics(request: &Request<'_>) -> Result<Operation, Problem> {
    let parameters = Parameters::of_query(request, &["max_age_ms"])?;
    expect_no_fields(request)?;
    let max_age = parameters.integer("max_age_ms")?.map(Duration::from_millis);
    Ok(Operation::Statistics { max_age })
}

fn set_statistics_interval(request: &Request<'_>) -> Result<Operation, Problem> {
    Parameters::of_query(request, &[])?;
    let fields = Fields::of_body(request, &["interval_seconds"])?;
    let seconds = fields.integer("interval_seconds", "seconds", MAX_STATISTICS_INTERVAL_SECONDS)?;
    let interval = (seconds != 0).then(|| Duration::from_secs(seconds));
    Ok(Operation::SetStatisticsInterval { interval })
}

fn free_pages(request: &Request<'_>) -> Result<Operation, Problem> {
    Parameters::of_query(request, &[])?;
    let fields = Fields::of_optional_body(request, &["min_order", "timeout_ms"])?;
    let orders = 0..=u64::from(MAX_FREE_PAGES_ORDER);
    let limits = 1..=MAX_FREE_PAGES_TIME_LIMIT_MS;
    let min_order =
        fields.optional_integer("min_order", "binary orders of pages", orders)?.unwrap_or(0);
    let limit_ms = fields.optional_integer("timeout_ms", "milliseconds", limits)?;
    Ok(Operation::FreePages {
        min_order: u8::try_from(min_order).unwrap_or(MAX_FREE_PAGES_ORDER),
        time_limit: Duration::from_millis(limit_ms.unwrap_or(FREE_PAGES_TIME_LIMIT_MS)),
    })
}

/// The parameters of a query, all of them known.
struct Parameters<'a>(Vec<(&'a str, &'a str)>);

impl<'a> Parameters<'a> {
    fn of_query(request: &Request<'a>, known: &[&str]) -> Result<Self, Problem> {
        let pairs: Vec<_> = request
            .query
            .unwrap_or_default()
            .split('&')
            .filter(|pair| !pair.is_empty())
            .map(|pair| pair.split_once('=').unwrap_or((pair, "")))
            .collect();
        for (index, (name, _)) in pairs.iter().enumerate() {
            let shown = name.escape_debug();
            if !known.contains(name) {
                let message = format!("{} has no query parameter '{shown}'", request.path);
                return Err(Problem::new(Status::BadRequest, message).with_remedy(one_of(known)));
            }
            if pairs[..index].iter().any(|(earlier, _)| earlier == name) {
                let message = format!("the query parameter '{shown}' occurs twice");
                return Err(Problem::new(Status::BadRequest, message));
            }
        }
        Ok(Self(pairs))
    }

    fn integer(&self, name: &str) -> Result<Option<u64>, Problem> {
        let Some((_, text)) = self.0.iter().find(|(key, _)| *key == name) else {
            return Ok(None);
        };
        text.parse().map(Some).map_err(|_| {
            let message = format!(
                "the query parameter '{name}' is '{}', not a whole number",
                text.escape_debug()
            );
            Problem::new(Status::BadRequest, message)
        })
    }
}

fn one_of(known: &[&str]) -> String {
    match known {
        [] => "send none".to_owned(),
        known => format!("known: {}", known.join(", ")),
    }
}

/// The members of a JSON object, all of them known and each there once.
///
/// Not a derived Deserialize: its messages name the position in the text but not the field of a
/// wrong type.
struct Fields(Vec<(String, Value)>);

impl Fields {
    fn of_body(request: &Request<'_>, known: &[&str]) -> Result<Self, Problem> {
        if request.body.trim_ascii().is_empty() {
            let message =
                format!("{} {} needs a JSON object as its body", request.method, request.path);
            return Err(Problem::new(Status::BadRequest, message)
                .with_remedy(format!("send an object with {}", known.join(", "))));
        }
        let fields: Self =
            serde_json::from_slice(request.body).map_err(|error| match error.classify() {
                serde_json::error::Category::Data => Problem::new(
                    Status::UnprocessableContent,
                    format!("the body is not a JSON object: {error}"),
                ),
                _ => Problem::new(Status::BadRequest, format!("the body is not JSON: {error}")),
            })?;
        for (index, (name, _)) in fields.0.iter().enumerate() {
            let shown = name.escape_debug();
            if !known.contains(&name.as_str()) {
                let message =
                    format!("unknown field '{shown}' for {} {}", request.method, request.path);
                return Err(Problem::new(Status::UnprocessableContent, message)
                    .with_field(name.as_str())
                    .with_remedy(one_of(known)));
            }
            if fields.0[..index].iter().any(|(earlier, _)| earlier == name) {
                let message = format!("the field '{shown}' occurs twice");
                return Err(
                    Problem::new(Status::UnprocessableContent, message).with_field(name.as_str())
                );
            }
        }
        Ok(fields)
    }

    /// The same where no body says as much as an empty object.
    fn of_optional_body(request: &Request<'_>, known: &[&str]) -> Result<Self, Problem> {
        if request.body.trim_ascii().is_empty() {
            Ok(Self(Vec::new()))
        } else {
            Self::of_body(request, known)
        }
    }

    fn has(&self, name: &str) -> bool {
        self.0.iter().any(|(key, _)| key == name)
    }

    /// The required text `name`, of the form `form`.
    fn text(&self, name: &'static str, form: &str) -> Result<String, Problem> {
        let problem = |message: String| {
            Problem::new(Status::UnprocessableContent, message)
                .with_field(name)
                .with_remedy(format!("send {form}"))
        };
        let Some((_, value)) = self.0.iter().find(|(key, _)| key == name) else {
            return Err(problem(format!("the field '{name}' is missing")));
        };
        match value.as_str() {
            Some(text) if !text.is_empty() && !text.contains('\0') => Ok(text.to_owned()),
            _ => Err(problem(format!("the field '{name}' is {}", describe(value)))),
        }
    }

    /// One of the words that `name_of` gives to `choices`, if `name` is there.
    fn optional_word<T: Copy>(
        &self,
        name: &'static str,
        choices: &[T],
        name_of: impl Fn(T) -> &'static str,
    ) -> Result<Option<T>, Problem> {
        let Some((_, value)) = self.0.iter().find(|(key, _)| key == name) else { return Ok(None) };
        let choice =
            choices.iter().copied().find(|choice| value.as_str() == Some(name_of(*choice)));
        choice.map(Some).ok_or_else(|| {
            let words: Vec<_> = choices.iter().map(|choice| name_of(*choice)).collect();
            Problem::new(
                Status::UnprocessableContent,
                format!("the field '{name}' is {}", describe(value)),
            )
            .with_field(name)
            .with_remedy(format!("send one of {}", words.join(", ")))
        })
    }

    /// The truth value `name`, if it is there.
    fn optional_switch(&self, name: &'static str) -> Result<Option<bool>, Problem> {
        let Some((_, value)) = self.0.iter().find(|(key, _)| key == name) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| {
            Problem::new(
                Status::UnprocessableContent,
                format!("the field '{name}' is {}", describe(value)),
            )
            .with_field(name)
            .with_remedy("send true or false")
        })
    }

    /// The required absolute path `name`.
    fn path(&self, name: &'static str) -> Result<PathBuf, Problem> {
        let problem = |message: String| {
            Problem::new(Status::UnprocessableContent, message)
                .with_field(name)
                .with_remedy("send the path of a file of the monitor's machine, from the root on")
        };
        let Some((_, value)) = self.0.iter().find(|(key, _)| key == name) else {
            return Err(problem(format!("the field '{name}' is missing")));
        };
        match value.as_str() {
            Some(text) if text.starts_with('/') && !text.contains('\0') => Ok(PathBuf::from(text)),
            _ => Err(problem(format!(
                "the field '{name}' is {}, which is no absolute path",
                describe(value)
            ))),
        }
    }

    /// The required whole number `name`, from 0 to `maximum`, in `unit`.
    fn integer(&self, name: &'static str, unit: &str, maximum: u64) -> Result<u64, Problem> {
        self.optional_integer(name, unit, 0..=maximum)?.ok_or_else(|| {
            Problem::new(Status::UnprocessableContent, format!("the field '{name}' is missing"))
                .with_field(name)
                .with_remedy(wanted(unit, &(0..=maximum)))
        })
    }

    /// The whole number `name` in `unit`, if it is there.
    fn optional_integer(
        &self,
        name: &'static str,
        unit: &str,
        range: RangeInclusive<u64>,
    ) -> Result<Option<u64>, Problem> {
        let Some((_, value)) = self.0.iter().find(|(key, _)| key == name) else { return Ok(None) };
        match value.as_u64() {
            Some(number) if range.contains(&number) => Ok(Some(number)),
            _ => {
                let message = format!("the field '{name}' is {}", describe(value));
                Err(Problem::new(Status::UnprocessableContent, message)
                    .with_field(name)
                    .with_remedy(wanted(unit, &range)))
            }
        }
    }
}

fn wanted(unit: &str, range: &RangeInclusive<u64>) -> String {
    format!("send a whole number of {unit}, from {} to {}", range.start(), range.end())
}

/// A value as an error shows it: short, with its type.
fn describe(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Number(number) if number.is_f64() => {
            format!("the number {number}, which is not a whole one in range")
        }
        Value::Number(number) => format!("{number}, which is out of range"),
        Value::String(text) if text.len() <= 40 => format!("the string {text:?}"),
        Value::String(_) => "a string".to_owned(),
        Value::Array(_) => "an array".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    }
}

impl<'de> Deserialize<'de> for Fields {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields, A::Error> {
        let mut members = Vec::new();
        while let Some(member) = map.next_entry()? {
            members.push(member);
        }
        Ok(Fields(members))
    }
}

#[cfg(test)]
mod tests;
