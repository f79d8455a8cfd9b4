//! Log lines that a guest can cause, at a limited rate for each place in the code.

/// Warns of something that the guest did, at most a few times a minute for each place that says so.
#[macro_export]
macro_rules! guest_log {
    ($($argument:tt)+) => {{
        static LIMIT: std::sync::Mutex<$crate::guest_log::LogLimit> =
            std::sync::Mutex::new($crate::guest_log::LogLimit::new());
        let permit =
            LIMIT.lock().unwrap_or_else(std::sync::PoisonError::into_inner).permit(std::time::Instant::now());
        if let Some(suppressed) = permit {
            tracing::warn!(suppressed, $($argument)+);
        }
    }};
}

pub use ebb_balloon::LogLimit;
