//! Figures of a series in addition to its metrics: tables and curves, as data of the document.

use serde::{Deserialize, Serialize};

use crate::report::statistics::{number, rounded};

/// A table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DataTable {
    /// What it shows.
    pub title: String,
    /// Headings, with units.
    pub columns: Vec<String>,
    /// Rows with one value per column.
    pub rows: Vec<Vec<Value>>,
}

/// A column: its heading, and a function from an item to its value.
pub type Column<'a, T> = (&'a str, &'a dyn Fn(&T) -> Value);

impl DataTable {
    /// A table with a row for each item.
    pub fn of<'a, T: 'a>(
        title: impl Into<String>,
        items: impl IntoIterator<Item = &'a T>,
        columns: &[Column<'_, T>],
    ) -> Self {
        let row = |item| columns.iter().map(|(_, value)| value(item)).collect();
        let rows = items.into_iter().map(row);
        Self::new(title, columns.iter().map(|(heading, _)| *heading), rows)
    }

    /// A table from its parts.
    pub fn new<C: Into<String>>(
        title: impl Into<String>,
        columns: impl IntoIterator<Item = C>,
        rows: impl IntoIterator<Item = Vec<Value>>,
    ) -> Self {
        Self {
            title: title.into(),
            columns: columns.into_iter().map(Into::into).collect(),
            rows: rows.into_iter().collect(),
        }
    }
}

/// A value of a table. Integers stay exact, to 64 bits with and without sign.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Value {
    /// An integer.
    Signed(i64),
    /// An integer beyond the signed ones.
    Unsigned(u64),
    /// A number.
    Float(f64),
    /// Text.
    Text(String),
}

impl Value {
    /// The value in readable form.
    pub fn shown(&self) -> String {
        match self {
            Self::Signed(value) => value.to_string(),
            Self::Unsigned(value) => value.to_string(),
            Self::Float(value) => number(Some(*value)),
            Self::Text(text) => text.clone(),
        }
    }
}

impl From<i64> for Value {
    fn from(value: i64) -> Self {
        Self::Signed(value)
    }
}

impl From<u32> for Value {
    fn from(value: u32) -> Self {
        Self::Signed(value.into())
    }
}

impl From<u64> for Value {
    /// Documents do not distinguish the types of small numbers, so that they have a single type.
    fn from(value: u64) -> Self {
        i64::try_from(value).map_or(Self::Unsigned(value), Self::Signed)
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Self {
        Self::Float(rounded(value))
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl<T: Into<Self>> From<Option<T>> for Value {
    /// A dash for a missing value.
    fn from(value: Option<T>) -> Self {
        value.map_or_else(|| Self::from("-"), Into::into)
    }
}

/// Curves over one axis.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Drawing {
    /// What it shows.
    pub title: String,
    /// The horizontal axis, with its unit.
    pub x: String,
    /// The vertical axis, with its unit.
    pub y: String,
    /// The curves, in the order of the legend.
    pub curves: Vec<Curve>,
}

/// One curve.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// Its name in the legend.
    pub name: String,
    /// Its points, from left to right.
    pub points: Vec<(f64, f64)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_survive_json_exactly() {
        for value in [
            Value::from(-1_i64),
            Value::from(i64::MIN),
            Value::from(u64::MAX),
            Value::from(u64::MAX - 123_200_000),
            Value::from(7_u64),
            Value::from(0.5),
            Value::from("master"),
        ] {
            let text = serde_json::to_string(&value).unwrap();
            assert_eq!(serde_json::from_str::<Value>(&text).unwrap(), value);
        }
        assert_eq!(Value::from(u64::MAX).shown(), "18446744073709551615");
    }
}
