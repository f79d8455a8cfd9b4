//! Results of a run: the document, and the table and the page rendered from it.

pub mod chart;
pub mod collection;
pub mod event;
pub mod figures;
pub mod metrics;
pub mod output;
pub mod page;
pub mod progress;
pub mod results;
pub mod statistics;
pub mod table;
