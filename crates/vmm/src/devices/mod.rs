//! Devices on the port and memory buses, and log lines caused by the guest, rate-limited per call
//! site.

pub mod bus;
pub mod console;
pub mod interrupt;
pub mod platform;
pub mod serial;
pub mod throttle;
pub mod virtio;

pub use ebb_balloon::LogLimit;

/// Logs a warning about the guest's behaviour, at most a few times a minute for each call site.
macro_rules! guest_log {
    ($($argument:tt)+) => {{
        static LIMIT: std::sync::Mutex<$crate::devices::LogLimit> =
            std::sync::Mutex::new($crate::devices::LogLimit::new());
        let permit = LIMIT
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .permit(std::time::Instant::now());
        if let Some(suppressed) = permit {
            tracing::warn!(suppressed, $($argument)+);
        }
    }};
}
pub(crate) use guest_log;
