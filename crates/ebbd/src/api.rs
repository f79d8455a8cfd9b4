//! The daemon's API: HTTP and JSON on a unix socket.
//!
//! | request | answer |
//! | --- | --- |
//! | `GET /status` | the host and its machines at the last decision ([`Status`]) |
//! | `GET /plan` | the same for a decision that would be made now, and is not carried out |
//! | `GET /fit?memory_bytes=N&profile=P` | how many more machines fit ([`Fit`]) |
//! | `PUT /hold`, `PUT /release` with [`Named`] | a machine is held, or no longer |
//! | `PUT /admit` with [`Arrival`] | whether a machine may start ([`Admission`]) |
//! | `GET /config` | the configuration in force ([`Config`]) |
//! | `PUT /config/reload` | reads the file again |
//! | `GET /metrics`, `GET /` | metrics, and a page for browsers ([`web`]) |
//!
//! Clients have rights by their user ([`User`]).
//!
//! [`Status`]: ebb_host_policy::report::Status
//! [`Admission`]: ebb_host_policy::report::Admission
//! [`Fit`]: ebb_host_policy::Fit
//! [`Config`]: crate::config::Config

use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::extract::rejection::{JsonRejection, QueryRejection};
use axum::extract::{DefaultBodyLimit, Extension, Json, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, put};
use ebb_host_policy::report::{Arrival, Named, Room};
use serde::Serialize;
use serde_json::json;
use tokio::net::UnixListener;

use crate::admission::Ticket;
use crate::clients;
use crate::clock::now_ms;
use crate::engine::Engine;
use crate::rights::{Places, User};
use crate::web;

/// The engine, which the loop and all clients share.
pub type Shared = Arc<Mutex<Engine>>;

/// Longest body of a request, in bytes.
const MOST_BODY_BYTES: usize = 64 << 10;
/// The longest name of a machine: that of a file.
const MOST_NAME_BYTES: usize = 255;
/// The longest wait for room, in milliseconds: a little less than a connection may take.
const MOST_WAIT_MS: u64 = 590_000;
/// How often a machine that waits is considered.
const ADMIT_AGAIN: Duration = Duration::from_millis(250);

/// Locks the engine.
pub fn lock(engine: &Shared) -> MutexGuard<'_, Engine> {
    engine.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why a request was not executed.
pub(crate) struct Problem {
    status: StatusCode,
    message: String,
    remedy: &'static str,
}

impl Problem {
    pub(crate) fn new(
        status: StatusCode,
        message: impl Into<String>,
        remedy: &'static str,
    ) -> Self {
        Self { status, message: message.into(), remedy }
    }

    pub(crate) fn too_early() -> Self {
        let message = "no decision has been made yet";
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message, "try again in a second")
    }

    fn forbidden(message: impl Into<String>, remedy: &'static str) -> Self {
        Self::new(StatusCode::FORBIDDEN, message, remedy)
    }

    fn no_profile(name: &str) -> Self {
        let message = format!("there is no profile {name:?}");
        Self::new(StatusCode::NOT_FOUND, message, "ebb host settings lists them")
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let Self { status, message, remedy } = self;
        let error = match remedy {
            "" => json!({ "message": message }),
            remedy => json!({ "message": message, "remedy": remedy }),
        };
        (status, Json(json!({ "error": error }))).into_response()
    }
}

impl From<JsonRejection> for Problem {
    fn from(rejection: JsonRejection) -> Self {
        Self::new(rejection.status(), rejection.body_text(), "")
    }
}

impl From<QueryRejection> for Problem {
    fn from(rejection: QueryRejection) -> Self {
        Self::new(rejection.status(), rejection.body_text(), "")
    }
}

fn reply(document: &impl Serialize) -> Response {
    Json(document).into_response()
}

/// The routes.
pub fn router(engine: Shared) -> Router {
    Router::new()
        .route("/status", get(async |engine| status(engine)))
        .route("/plan", get(async |engine| plan(engine)))
        .route("/fit", get(async |engine, room| fit(engine, room)))
        .route("/hold", put(async |engine, user, named| hold(engine, user, named, true)))
        .route("/release", put(async |engine, user, named| hold(engine, user, named, false)))
        .route("/admit", put(admit))
        .route("/config", get(async |engine| config(engine)))
        .route("/config/reload", put(async |engine, user| reload(engine, user)))
        .merge(web::pages())
        .fallback(async || {
            Problem::new(StatusCode::NOT_FOUND, "there is no such path", "docs/host.md lists them")
        })
        .method_not_allowed_fallback(async || {
            let message = "this path has another method";
            Problem::new(StatusCode::METHOD_NOT_ALLOWED, message, "docs/host.md lists them")
        })
        .layer(DefaultBodyLimit::max(MOST_BODY_BYTES))
        .with_state(engine)
}

pub(crate) fn status(State(engine): State<Shared>) -> Result<Response, Problem> {
    let status = lock(&engine).status().ok_or_else(Problem::too_early)?;
    Ok(reply(&status))
}

fn plan(State(engine): State<Shared>) -> Result<Response, Problem> {
    let failed = |error: crate::host::Unreadable| {
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, error.to_string(), "")
    };
    let plan = lock(&engine).plan(now_ms()).map_err(failed)?;
    Ok(reply(&plan))
}

fn fit(
    State(engine): State<Shared>,
    room: Result<Query<Room>, QueryRejection>,
) -> Result<Response, Problem> {
    let Query(room) = room?;
    let mut engine = lock(&engine);
    if !engine.has_profile(&room.profile) {
        return Err(Problem::no_profile(&room.profile));
    }
    check_size(room.memory_bytes)?;
    Ok(reply(&engine.fit(&room, now_ms()).ok_or_else(Problem::too_early)?))
}

fn check_size(memory_bytes: u64) -> Result<(), Problem> {
    if memory_bytes > 0 {
        return Ok(());
    }
    let remedy = "give the size of one machine";
    Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "memory_bytes is 0", remedy))
}

/// A place in the queue, which is left when its client leaves.
struct Place {
    engine: Shared,
    ticket: Ticket,
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.engine).admissions().leave(self.ticket);
    }
}

async fn admit(
    State(engine): State<Shared>,
    Extension(user): Extension<User>,
    arrival: Result<Json<Arrival>, JsonRejection>,
) -> Result<Response, Problem> {
    let Json(arrival) = arrival?;
    check_size(arrival.memory_bytes)?;
    if arrival.machine.is_empty() || arrival.machine.len() > MOST_NAME_BYTES {
        let message = format!("the name has {} bytes", arrival.machine.len());
        let remedy = "give one of 1 to 255";
        return Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, message, remedy));
    }
    let ticket = lock(&engine).admissions().enter(user).ok_or_else(|| {
        let message = "too many machines wait for room";
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, message, "try again later")
    })?;
    let place = Place { engine: engine.clone(), ticket };
    let never_fits = lock(&engine).is_larger_than_host(arrival.memory_bytes);
    let wait_ms = if never_fits { 0 } else { arrival.wait_ms.min(MOST_WAIT_MS) };
    let until_ms = now_ms().saturating_add(wait_ms);
    loop {
        let is_over = now_ms() >= until_ms;
        // What fits is calculated for the first ones of the queue, however many wait.
        let admission = {
            let mut engine = lock(&engine);
            let is_asked = is_over || engine.admissions().before(place.ticket) == 0;
            is_asked.then(|| engine.admit(&arrival, place.ticket, now_ms())).flatten()
        };
        let is_admitted = admission.as_ref().is_some_and(|admission| admission.is_admitted);
        if is_admitted || is_over {
            return Ok(reply(&admission.ok_or_else(Problem::too_early)?));
        }
        tokio::time::sleep(ADMIT_AGAIN).await;
    }
}

fn hold(
    State(engine): State<Shared>,
    Extension(user): Extension<User>,
    named: Result<Json<Named>, JsonRejection>,
    is_held: bool,
) -> Result<Response, Problem> {
    let Json(Named { machine }) = named?;
    let mut engine = lock(&engine);
    if !user.may_hold(engine.socket(&machine)) {
        let message = format!("{machine:?} is not a machine of this user");
        let remedy = "only root, the daemon's user and the owner of the machine's socket may";
        return Err(Problem::forbidden(message, remedy));
    }
    let status = engine.hold(&machine, is_held).ok_or_else(|| {
        let message = format!("there is no machine {machine:?}");
        Problem::new(StatusCode::NOT_FOUND, message, "ebb host status lists them")
    })?;
    Ok(reply(&status))
}

fn config(State(engine): State<Shared>) -> Response {
    reply(lock(&engine).config())
}

fn reload(
    State(engine): State<Shared>,
    Extension(user): Extension<User>,
) -> Result<Response, Problem> {
    if !user.is_operator() {
        let message = "this user may not change the configuration";
        return Err(Problem::forbidden(message, "only root and the daemon's user may"));
    }
    let mut engine = lock(&engine);
    engine.reload().map_err(|error| {
        let remedy = "mend the file; the old configuration is still in force";
        Problem::new(StatusCode::UNPROCESSABLE_ENTITY, error.to_string(), remedy)
    })?;
    Ok(reply(engine.config()))
}

/// Serves clients for ever.
///
/// # Errors
/// The socket cannot be used.
pub async fn serve(listener: OwnedFd, engine: Shared) -> std::io::Result<Infallible> {
    let listener = std::os::unix::net::UnixListener::from(listener);
    listener.set_nonblocking(true)?;
    let listener = UnixListener::from_std(listener)?;
    let router = router(engine);
    let places = Places::default();
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(clients::ACCEPT_PAUSE).await;
            continue;
        };
        let Ok(user) = User::behind(&stream) else { continue };
        let Some(place) = places.take(user) else { continue };
        clients::serve(stream, router.clone().layer(Extension(user)), place);
    }
}
