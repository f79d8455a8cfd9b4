//! Refusals: a status and a `fault_message`.

use std::borrow::Cow;
use std::fmt::Display;

use serde_json::{Value, json};

use crate::api::control::ControlError;
use crate::api::reply::{Reply, Status};
use crate::mmds::StoreError;

/// Messages that several requests share.
pub(super) const PRE_BOOT: &str =
    "The requested operation is not supported before starting the microVM.";
pub(super) const POST_BOOT: &str =
    "The requested operation is not supported after starting the microVM.";
pub(super) const EMPTY_ID: &str = "The ID cannot be empty.";
pub(super) const NO_DEVICE: &str = "Failed perform action on device: Device not found";

/// Why a request was not executed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    status: Status,
    message: Cow<'static, str>,
}

impl Fault {
    /// A refusal with the status 400, which Firecracker gives nearly all of them.
    pub(super) fn new(message: impl Into<Cow<'static, str>>) -> Self {
        Self { status: Status::BadRequest, message: message.into() }
    }

    /// A refusal by the store of the metadata.
    pub(super) fn of_store(error: StoreError) -> Self {
        match error {
            StoreError::Uninitialized => {
                Self::new("MMDS error: The MMDS data store is not initialized.")
            }
            StoreError::TooLarge => Self {
                status: Status::ContentTooLarge,
                message: "MMDS limit exceeded error: The MMDS patch request doesn't fit.".into(),
            },
        }
    }

    /// A body that is not the document.
    pub(super) fn json(error: &impl Display) -> Self {
        Self::new(format!(
            "An error occurred when deserializing the json body of a request: {error}."
        ))
    }

    /// A method and a path that are not served.
    pub(super) fn invalid_path(method: &str, path: &str) -> Self {
        Self::new(format!("Invalid request method and/or path: {method} {path}."))
    }

    /// Something of Firecracker that this monitor does not have.
    pub(super) fn not_served(what: &str) -> Self {
        Self::new(format!(
            "The requested operation is not supported: {what} (this is Ebb's API for Firecracker's \
             clients)"
        ))
    }

    /// A refusal by the machine; `what` is the beginning of Firecracker's message.
    pub(super) fn of(what: &'static str) -> impl Fn(ControlError) -> Self {
        move |error| {
            let remedy = match &error {
                ControlError::WrongState { remedy, .. } | ControlError::Invalid { remedy, .. } => {
                    remedy.clone().map(|remedy| format!("; {remedy}"))
                }
                _ => None,
            };
            Self::new(format!("{what}: {error}{}", remedy.unwrap_or_default()))
        }
    }

    /// Puts the name of the part that refused before the message.
    pub(super) fn within(mut self, part: &str) -> Self {
        self.message = format!("{part}: {}", self.message).into();
        self
    }

    /// The message.
    pub(super) fn message(&self) -> &str {
        &self.message
    }
}

/// What a request that was executed reports.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Answer {
    /// Nothing.
    Empty,
    /// A document.
    Document(Value),
}

impl Answer {
    /// `document` as JSON.
    pub(super) fn of(document: &impl serde::Serialize) -> Result<Self, Fault> {
        serde_json::to_value(document).map(Self::Document).map_err(|error| Fault::json(&error))
    }
}

/// The reply to a request.
pub(super) fn reply(result: Result<Answer, Fault>) -> Reply {
    match result {
        Ok(Answer::Document(document)) => Reply::json(Status::Ok, &document),
        Ok(Answer::Empty) => Reply::json(Status::NoContent, &Value::Null),
        Err(fault) => Reply::json(fault.status, &json!({ "fault_message": fault.message })),
    }
}
